"""Train a small model with every loss through a real server, and print the effect of each.

    python tools/check_loss_families.py [LOSS ...]

Tokens are good or bad. Supervised losses see texts of good tokens, good responses are preferred to bad ones,
and a sampled response's reward is its share of good tokens. Each loss has a held-out metric that it should change; the
table, the first of ``docs/loss_checks.md``, gives it before and after, and the number of warnings in the
results. The exit status is 1 if a metric did not change as expected. ``tools/measure_losses.py`` measures the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _support.small_model import small_model

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


HELD_OUT = Data(1)
HELD_PROMPTS, HELD_TEXTS = HELD_OUT.prompts(32), HELD_OUT.texts(32)
HELD_GOOD, HELD_BAD = HELD_OUT.pairs(32)


# ------------------------------------------------------------------ held-out metrics


async def nll(run: Run) -> float:
    """Negative log-likelihood of good texts per token."""
    return -float(np.concatenate(await run.compute_logprobs(HELD_TEXTS)).mean())


async def margin(run: Run) -> float:
    """Difference of the log-probabilities of good and bad responses per token, in nats."""
    good, bad = await run.compute_logprobs(HELD_GOOD), await run.compute_logprobs(HELD_BAD)
    return float(np.mean([a[-RESPONSE:].mean() - b[-RESPONSE:].mean() for a, b in zip(good, bad, strict=True)]))


async def share(run: Run) -> float:
    """Share of good tokens in samples."""
    result = await run.sample(HELD_PROMPTS, n=4, max_tokens=RESPONSE, seed=7, ignore_eos=True)
    return float(np.mean([reward(sample.token_ids) for samples in result.samples for sample in samples]))


async def reward_accuracy(run: Run) -> float:
    good, bad = await run.compute_rewards(HELD_GOOD), await run.compute_rewards(HELD_BAD)
    return float(np.mean(good > bad))


def metric(name: str, batch: dict[str, Any]) -> Callable[[Run, Check], Awaitable[float]]:
    """A metric of the loss itself, on a held-out batch."""

    async def figure(run: Run, check: Check) -> float:
        return (await run.forward(batch, check.loss, check.kwargs)).metrics[name]

    return figure


def reward(tokens: np.ndarray) -> float:
    return float(np.isin(tokens, GOOD).mean())


# ------------------------------------------------------------------ batches


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


# ------------------------------------------------------------------ the losses


@dataclass(frozen=True)
class Check:
    """A loss, its batches, and the metric that it should change.

    Attributes:
        make: Builds a batch from data, or from samples of the run.
        figure: The held-out metric.
        rises: Whether higher is better.
        by: Minimum change of the metric.
    """

    loss: str
    make: Callable[[Data], dict[str, Any]] | Callable[[Samples], dict[str, Any]]
    figure: Callable[..., Awaitable[float]]
    rises: bool
    by: float
    label: str = ""
    online: bool = False
    head: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    learning_rate: float = 3e-3

    @property
    def name(self) -> str:
        return f"`{self.loss}` {self.label}".strip()


def online(loss: str, make: Callable[[Samples], dict[str, Any]], **more: Any) -> Check:
    return Check(loss, make, share, True, 0.15, online=True, **more)


def preference(loss: str, label: str = "", by: float = 0.3, **kwargs: Any) -> Check:
    return Check(loss, pair_batch, margin, True, by, label=label, kwargs=kwargs)


BASE = {"reference_model": "base"}
DPO_TYPES = ["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
             "aot_unpaired", "apo_zero", "apo_down", "sigmoid_norm"]  # fmt: skip
TINKER_LOSSES = ["importance_sampling", "ppo", "cispo", "dro", "gspo"]
GROUP_LOSSES = ["grpo", "dapo", "group_gspo", "gspo_token", "gmpo", "sapo", "group_cispo", "rloo", "opo",
                "gpg", "reinforce_plus_plus_baseline"]  # fmt: skip


def checks(teacher: str) -> list[Check]:
    held = Data(2)
    return [
        Check("causal_lm", text_batch, nll, False, 0.5),
        Check("causal_lm", text_batch, nll, False, 0.5, label="dft", kwargs={"loss_type": "dft"}, steps=40),
        Check("causal_lm", text_batch, nll, False, 0.5, label="smoothed", kwargs={"label_smoothing": 0.1}),
        Check("cross_entropy", target_batch, nll, False, 0.5),
        *(
            preference("dpo", kind, loss_type=kind, **BASE, **({"label_smoothing": 0.1} if kind == "exo_pair" else {}))
            for kind in DPO_TYPES
        ),
        # Its slope has the wrong sign where policy and reference agree: it starts late.
        preference("dpo", "discopop", by=0.1, loss_type="discopop", discopop_tau=0.5, **BASE),
        preference("dpo", "weighted", use_weighting=True, **BASE),
        preference("dpo", "forward_kl", f_divergence_type="forward_kl", **BASE),
        preference("simpo"),
        preference("orpo"),
        preference("cpo"),
        Check("kto", kto_batch, margin, True, 0.3, kwargs=BASE),
        Check("bco", unpaired_batch, margin, True, 0.3, kwargs=BASE),
        Check("reward_modeling", lambda d: _without_prompts(pair_batch(d)), reward_accuracy, True, 0.2, head="reward"),
        Check("plackett_luce", ranked_batch, reward_accuracy, True, 0.2, head="reward"),
        Check("score_regression", scored_batch, metric("mse", scored_batch(held)), False, 0.02, head="reward",
              steps=40),
        Check("process_reward", step_batch, metric("step_accuracy", step_batch(held)), True, 0.2, head="reward"),
        Check(
            "sequence_classification", labelled_batch, metric("accuracy", labelled_batch(held)), True, 0.2,
            head="classification",
        ),
        Check("token_classification", token_batch, metric("accuracy", token_batch(held)), True, 0.2,
              head="classification"),
        Check("value_only", valued_batch, metric("value_loss", valued_batch(held)), False, 0.01, head="value"),
        online("enhanced_ppo", Samples.rows, head="value", kwargs=BASE),
        online("enhanced_ppo", Samples.rows, label="whitened", head="value", kwargs=BASE | {"whiten_advantages": True}),
        *(online(loss, Samples.groups, kwargs=BASE) for loss in GROUP_LOSSES),
        online("dr_grpo", Samples.groups, kwargs=BASE | {"reduction_divisor": RESPONSE}),
        online("gigpo", Samples.steps, kwargs=BASE),
        online("reinforce", lambda s: s.rows(centred=True)),
        online("reinforce_plus_plus", Samples.rows),
        online("remax", lambda s: s.rows() | {"greedy_rewards": [g for g in s.greedy for _ in range(4)]}, steps=40),
        online("importance_sampling", lambda s: s.rows("behavior_log_probs", centred=True), kwargs=BASE),
        *(online(loss, Samples.tinker, label="tinker") for loss in TINKER_LOSSES),
        Check("gkd", text_batch, nll, False, 0.5, kwargs={"reference_model": teacher}),
        online("on_policy_distillation", _without_rewards, kwargs={"reference_model": teacher}),
        Check("top_k_distillation", stored_teacher_batch, share, True, 0.3),
    ]  # fmt: skip


def _without_prompts(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: rows for name, rows in batch.items() if name != "prompt_lengths"}


def _without_rewards(samples: Samples) -> dict[str, Any]:
    return {name: rows for name, rows in samples.rows().items() if name != "rewards"}


# ------------------------------------------------------------------ running the checks


@dataclass(frozen=True)
class Outcome:
    check: Check
    before: float
    after: float
    warnings: int

    @property
    def moved(self) -> bool:
        return (self.after - self.before) * (1 if self.check.rises else -1) >= self.check.by


async def figure(check: Check, run: Run) -> float:
    takes_check = check.figure not in (nll, margin, share, reward_accuracy)
    return await (check.figure(run, check) if takes_check else check.figure(run))


async def train(service: gradwire.ServiceClient, check: Check) -> Outcome:
    labels = {"num_labels": 2} if check.head == "classification" else {}
    run = await service.create_run("small", head=check.head, seed=3, **labels)
    data, warnings = Data(11), 0
    before = await figure(check, run)
    for _ in range(check.steps):
        batch = check.make(await Samples.of(run, data) if check.online else data)  # type: ignore[arg-type]
        result, step = run.forward_backward(batch, check.loss, check.kwargs), run.optim_step(check.learning_rate)
        warnings += len((await result).warnings)
        await step
    outcome = Outcome(check, before, await figure(check, run), warnings)
    await service.delete_run(run.run_id)
    return outcome


async def bounded(service: gradwire.ServiceClient) -> tuple[float, float, float]:
    """KL to the base after PPO for a reward, with and without ``conservative_ppo``; and the bound of the former.

    The penalty is soft and begins at four fifths of the bound.
    """
    bound, final = 0.05, []
    for loss, kwargs in (
        ("enhanced_ppo", BASE | {"beta": 0.0}),
        ("conservative_ppo", BASE | {"max_kl_divergence": 0.8 * bound, "conservative_coef": 1000.0}),
    ):
        run, data = await service.create_run("small", head="value", seed=3), Data(11)
        for _ in range(25):
            run.forward_backward((await Samples.of(run, data)).rows(), loss, kwargs)
            await run.optim_step(1e-3)
        fresh = (await Samples.of(run, data)).rows()
        final.append((await run.forward(fresh, loss, kwargs)).metrics["kl_divergence"])
    return final[0], final[1], bound


async def teacher(service: gradwire.ServiceClient) -> str:
    """Train a checkpoint on good texts."""
    run, data = await service.create_run("small", seed=5), Data(13)
    for _ in range(30):
        run.forward_backward(text_batch(data), "causal_lm")
        await run.optim_step(3e-3)
    return (await run.save_checkpoint("teacher")).path


async def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = small_model(Path(folder) / "model", hidden_size=48, num_layers=2)
        async with gradwire.connect(models=[f"small={path}"], state_dir=Path(folder) / "state") as service:
            todo = [check for check in checks(await teacher(service)) if not names or check.loss in names]
            failed = 0
            print("| loss | before | after | warnings |\n| --- | --- | --- | --- |")
            for check in todo:
                outcome = await train(service, check)
                failed += not outcome.moved
                verdict = "" if outcome.moved else " DID NOT MOVE"
                numbers = f"{outcome.before:.3f} | {outcome.after:.3f} | {outcome.warnings} |"
                print(f"| {check.name} | {numbers}{verdict}", flush=True)
            if not names or "conservative_ppo" in names:
                free, held, bound = await bounded(service)
                failed += not held <= bound < free
                print(f"conservative_ppo: KL to the base {held:.3f} with a bound of {bound}, {free:.3f} without")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("losses", nargs="*", help="names; all by default")
    sys.exit(asyncio.run(main(parser.parse_args().losses)))
