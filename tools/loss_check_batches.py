"""Batches of good and bad tokens for every loss, for ``check_loss_families.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradwire
import numpy as np

GOOD = np.arange(40, 70)
BAD = np.arange(5, 35)
PROMPT, RESPONSE, ROWS = 3, 6, 16
Rows = list[list[int]]
Run = gradwire.TrainingClient


class Data:
    """Draws texts; each call returns new ones."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def tokens(self, pool: np.ndarray, length: int) -> list[int]:
        return [int(token) for token in self.rng.choice(pool, length)]

    def prompts(self, rows: int = ROWS) -> Rows:
        return [self.tokens(np.concatenate([GOOD, BAD]), PROMPT) for _ in range(rows)]

    def texts(self, rows: int = ROWS) -> Rows:
        return [self.tokens(GOOD, PROMPT + RESPONSE) for _ in range(rows)]

    def pairs(self, rows: int = ROWS) -> tuple[Rows, Rows]:
        prompts = self.prompts(rows)
        return tuple([p + self.tokens(pool, RESPONSE) for p in prompts] for pool in (GOOD, BAD))  # type: ignore[return-value]


def reward(tokens: np.ndarray) -> float:
    return float(np.isin(tokens, GOOD).mean())


@dataclass(frozen=True)
class Samples:
    """Four responses per prompt, from the run's current policy."""

    prompts: Rows
    responses: list[Rows]
    logprobs: list[list[list[float]]]
    rewards: list[list[float]]
    greedy: list[float]

    @staticmethod
    async def of(run: Run, data: Data) -> Samples:
        prompts = data.prompts(8)
        drawn = run.sample(prompts, n=4, max_tokens=RESPONSE, ignore_eos=True)
        best = await run.sample(prompts, max_tokens=RESPONSE, temperature=0.0, ignore_eos=True)
        samples = (await drawn).samples
        return Samples(
            prompts,
            [[s.token_ids.tolist() for s in group] for group in samples],
            [[s.logprobs.tolist() for s in group] for group in samples],
            [[reward(s.token_ids) for s in group] for group in samples],
            [reward(group[0].token_ids) for group in best.samples],
        )

    def groups(self) -> dict[str, Any]:
        return {
            "prompt_ids": self.prompts,
            "response_ids": self.responses,
            "rewards": self.rewards,
            "old_log_probs": self.logprobs,
        }

    def steps(self) -> dict[str, Any]:
        """Split each response into two steps of three tokens, each in a state of its own group and position."""
        halves = [[[t // 3 for t in range(RESPONSE)] for _ in group] for group in self.responses]
        return self.groups() | {"step_ids": halves, "anchor_ids": halves}

    def rows(self, logprobs: str = "old_log_probs", *, centred: bool = False) -> dict[str, Any]:
        rewards = [r for group in self.rewards for r in group]
        mean = float(np.mean(rewards)) if centred else 0.0
        return {
            "input_ids": self._sequences(),
            "loss_mask": [[0] * PROMPT + [1] * RESPONSE] * len(rewards),
            logprobs: [row for group in self.logprobs for row in group],
            "rewards": [r - mean for r in rewards],
        }

    def tinker(self) -> dict[str, Any]:
        """A batch in Tinker's convention: the targets are the next tokens, nothing is shifted."""
        rows, ahead = self.rows(centred=True), [0.0] * (PROMPT - 1)
        return {
            "input_ids": [row[:-1] for row in rows["input_ids"]],
            "target_tokens": [row[1:] for row in rows["input_ids"]],
            "logprobs": [ahead + row for row in rows["old_log_probs"]],
            "advantages": [ahead + [r] * RESPONSE for r in rows["rewards"]],
            "mask": [[0] * len(ahead) + [1] * RESPONSE] * len(rows["rewards"]),
        }

    def _sequences(self) -> Rows:
        return [p + row for p, group in zip(self.prompts, self.responses, strict=True) for row in group]


def pair_batch(data: Data) -> dict[str, Any]:
    good, bad = data.pairs()
    return {"chosen_input_ids": good, "rejected_input_ids": bad, "prompt_lengths": [PROMPT] * ROWS}


def unpaired_batch(data: Data) -> dict[str, Any]:
    good, bad = data.pairs(ROWS // 2)
    labels = [1] * len(good) + [0] * len(bad)
    return {"input_ids": good + bad, "label": labels, "prompt_lengths": [PROMPT] * ROWS}


def kto_batch(data: Data) -> dict[str, Any]:
    batch = unpaired_batch(data)
    rows = batch["input_ids"]
    other = [row[:PROMPT] + rows[i - 1][PROMPT:] for i, row in enumerate(rows)]
    return batch | {"kl_input_ids": other}


def ranked_batch(data: Data) -> dict[str, Any]:
    """Responses with 6, 3 and 0 good tokens, in this order."""
    responses = [[data.tokens(GOOD, n) + data.tokens(BAD, RESPONSE - n) for n in (6, 3, 0)] for _ in range(ROWS)]
    return {"prompt_ids": data.prompts(), "response_ids": responses}


def mixed_rows(data: Data) -> Rows:
    return [data.tokens(np.concatenate([GOOD, BAD]), 8) for _ in range(ROWS)]


def scored_batch(data: Data) -> dict[str, Any]:
    """Sequences whose score is the share of good tokens among the last four."""
    rows = mixed_rows(data)
    return {"input_ids": rows, "scores": [reward(np.array(row[-4:])) for row in rows]}


def labelled_batch(data: Data) -> dict[str, Any]:
    rows = mixed_rows(data)
    return {"input_ids": rows, "label": [int(row[-1] in GOOD) for row in rows]}


def step_batch(data: Data) -> dict[str, Any]:
    """Steps of two tokens; a step is right if its last token is good."""
    rows = mixed_rows(data)
    labels = [[float(token in GOOD) if t % 2 else -100.0 for t, token in enumerate(row)] for row in rows]
    return {"input_ids": rows, "step_labels": labels}


def token_batch(data: Data) -> dict[str, Any]:
    rows = mixed_rows(data)
    return {"input_ids": rows, "token_labels": [[int(token in GOOD) for token in row] for row in rows]}


def text_batch(data: Data) -> dict[str, Any]:
    return {"input_ids": data.texts()}


def target_batch(data: Data) -> dict[str, Any]:
    rows = data.texts()
    weight = 1 / (ROWS * (PROMPT + RESPONSE - 1))
    return {
        "input_ids": [row[:-1] for row in rows],
        "target_tokens": [row[1:] for row in rows],
        "weights": [[weight] * (len(row) - 1) for row in rows],
    }


def stored_teacher_batch(data: Data) -> dict[str, Any]:
    """A stored teacher that gives ten good tokens equal probability everywhere."""
    rows = data.texts()
    ids = [[GOOD[:10].tolist() for _ in row] for row in rows]
    logprobs = [[[float(np.log(0.1))] * 10 for _ in row] for row in rows]
    return {"input_ids": rows, "teacher_token_ids": ids, "teacher_log_probs": logprobs}


def valued_batch(data: Data) -> dict[str, Any]:
    rows = mixed_rows(data)
    return {"input_ids": rows, "rewards": [reward(np.array(row)) for row in rows]}


def without_prompts(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: rows for name, rows in batch.items() if name != "prompt_lengths"}


def without_rewards(samples: Samples) -> dict[str, Any]:
    return {name: rows for name, rows in samples.rows().items() if name != "rewards"}
