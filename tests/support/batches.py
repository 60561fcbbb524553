"""A small valid batch for each loss, as a user would write it: padded arrays with masks, ragged rows inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Batch = dict[str, Any]

VOCAB = 64
"""Ids below this are in every tiny model's vocabulary."""


def padded(rows: list[np.ndarray], dtype: Any) -> np.ndarray:
    out = np.zeros((len(rows), max(len(row) for row in rows)), dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def ids_and_mask(rng: np.random.Generator, lengths: list[int], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [rng.integers(3, vocab, length) for length in lengths]
    return padded(rows, np.int64), padded([np.ones(length) for length in lengths], np.int64)


def causal_lm(rng: np.random.Generator, rows: int, vocab: int) -> Batch:
    ids, mask = ids_and_mask(rng, rng.integers(1, 20, rows).tolist(), vocab)
    return {"input_ids": ids, "attention_mask": mask}


def pairs(rng: np.random.Generator, rows: int, vocab: int) -> Batch:
    chosen, chosen_mask = ids_and_mask(rng, rng.integers(4, 20, rows).tolist(), vocab)
    rejected, rejected_mask = ids_and_mask(rng, rng.integers(4, 20, rows).tolist(), vocab)
    return {
        "chosen_input_ids": chosen,
        "chosen_attention_mask": chosen_mask,
        "rejected_input_ids": rejected,
        "rejected_attention_mask": rejected_mask,
    }


def preferences(rng: np.random.Generator, rows: int, vocab: int) -> Batch:
    return pairs(rng, rows, vocab) | {"prompt_lengths": rng.integers(1, 4, rows)}


def trajectories(rng: np.random.Generator, rows: int, vocab: int) -> Batch:
    ids, mask = ids_and_mask(rng, rng.integers(2, 20, rows).tolist(), vocab)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "old_log_probs": rng.normal(-4, 0.3, ids.shape).astype(np.float32),
        "rewards": rng.normal(0, 1, ids.shape).astype(np.float32),
    }


def ppo(rng: np.random.Generator, rows: int, vocab: int) -> Batch:
    batch = trajectories(rng, rows, vocab)
    return batch | {"old_values": rng.normal(0, 0.5, batch["input_ids"].shape).astype(np.float32)}


def groups(rng: np.random.Generator, rows: int, vocab: int, samples: int = 3) -> Batch:
    response = rng.integers(3, vocab, (rows, samples, 9))
    lengths = rng.integers(1, 10, (rows, samples))
    return {
        "prompt_ids": rng.integers(3, vocab, (rows, 5)),
        "response_ids": response,
        "response_masks": (np.arange(9) < lengths[..., None]).astype(np.int64),
        "old_log_probs": rng.normal(-4, 0.3, response.shape).astype(np.float32),
        "rewards": rng.normal(0, 1, (rows, samples)).astype(np.float32),
    }


def off_policy(rng: np.random.Generator, rows: int, vocab: int) -> Batch:
    ids, mask = ids_and_mask(rng, rng.integers(2, 20, rows).tolist(), vocab)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "behavior_log_probs": rng.normal(-4, 0.3, ids.shape).astype(np.float32),
        "rewards": rng.normal(0, 1, rows).astype(np.float32),
    }


SEVEN: dict[str, tuple[Callable[[np.random.Generator, int, int], Batch], dict[str, Any], str | None]] = {
    "causal_lm": (causal_lm, {}, None),
    "dpo": (preferences, {"beta": 0.1, "reference_model": "base"}, None),
    "enhanced_ppo": (ppo, {"reference_model": "base"}, "value"),
    "grpo": (groups, {"reference_model": "base"}, None),
    "importance_sampling": (off_policy, {"reference_model": "base"}, None),
    "conservative_ppo": (ppo, {"reference_model": "base"}, "value"),
    "reward_modeling": (pairs, {"margin": 0.1}, "reward"),
}
"""Loss name -> builder of a batch, loss_kwargs, the head that the run needs."""


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """The first and the second half of a batch's rows."""
    rows = len(next(iter(batch.values()))) // 2
    return {k: v[:rows] for k, v in batch.items()}, {k: v[rows:] for k, v in batch.items()}
