"""Random batches of the policy losses, of which a case is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.losses import Case, Columns, bits, group_columns, logps, numbers, per_row, row_columns, tokens

BASE = {"reference_model": "base"}


def predictions(rng: np.random.Generator, *fields: str, candidates: int = 0) -> Columns:
    """Rows in Tinker's convention: every token is scored as far as the mask goes, the first one too."""
    columns = row_columns(rng)
    ids, mask = columns["input_ids"], columns.pop("loss_mask")
    mask[1] = [1]
    many = [[tokens(rng, candidates) for _ in row] for row in ids]
    columns |= {"target_tokens": many if candidates else [tokens(rng, len(row)) for row in ids], "mask": mask}
    every = {
        "weights": numbers(rng, columns["target_tokens"]),
        "logprobs": logps(rng, ids, 0.5, -1.4),
        "advantages": numbers(rng, ids),
        "sequence_ratio_mask": bits(rng, ids),
    }
    return columns | {name: every[name] for name in fields}


def teacher_columns(rng: np.random.Generator, k: int = 3) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    probabilities = rng.dirichlet([1.0] * (k + 1), sum(map(len, ids)))[:, :-1]
    logs = iter(np.log(np.maximum(probabilities, 1e-4)).astype(np.float32).tolist())
    return columns | {
        "teacher_token_ids": [[tokens(rng, k) for _ in row] for row in ids],
        "teacher_log_probs": [[next(logs) for _ in row] for row in ids],
    }


def trajectories(rng: np.random.Generator, *fields: str, by_row: bool = False) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    every = {
        "old_log_probs": logps(rng, ids, 0.5, -1.4),
        "ref_log_probs": logps(rng, ids, 0.5, -1.4),
        "old_values": numbers(rng, ids),
        "bootstrap_values": per_row(rng, len(ids)),
        "greedy_rewards": per_row(rng, len(ids)),
        "rewards": per_row(rng, len(ids)) if by_row else numbers(rng, ids),
    }
    return columns | {name: every[name] for name in ("rewards", *fields)}


def samples(rng: np.random.Generator, *fields: str) -> Columns:
    columns = group_columns(rng)
    responses = columns["response_ids"]
    every = {
        "planning_mask": bits(rng, responses, 0.4),
        "old_log_probs": logps(rng, responses, 0.5, -1.4),
        "ref_log_probs": logps(rng, responses, 0.5, -1.4),
        "sampler_log_probs": logps(rng, responses, 0.7, -1.4),
        "truncated": bits(rng, [[0] * len(group) for group in responses], 0.4),
        "advantages": numbers(rng, [[0] * len(group) for group in responses]),
        "token_advantages": numbers(rng, responses),
        "step_ids": [[np.sort(rng.integers(0, 3, len(r))).tolist() for r in group] for group in responses],
        "step_rewards": numbers(rng, responses),
    }
    every["anchor_ids"] = [
        [[int(rng.integers(0, 2)) + step for step in r] for r in group] for group in every["step_ids"]
    ]
    columns |= {name.removeprefix("token_"): every[name] for name in fields}
    return columns


def case(loss: str, build: Any, reference: Any, label: str = "", gradcheck: bool = True, **kwargs: Any) -> Case:
    return Case(loss, build, kwargs, reference, label, gradcheck=gradcheck)


RL = ("logprobs", "advantages")


WAYS: list[dict[str, Any]] = [
    {"reduction": "token_mean"},
    {"reduction": "sequence_mean"},
    {"reduction": "sequence_mean_token_sum"},
    {"reduction": "fixed", "reduction_divisor": 7.0},
]


BOUNDS = {"clip_epsilon": 0.05, "clip_epsilon_high": 0.08, "ratio_max": 1.3}


def unrewarded(rng: np.random.Generator, *fields: str) -> Columns:
    return {name: rows for name, rows in trajectories(rng, *fields).items() if name != "rewards"}


def failures(rng: np.random.Generator) -> Columns:
    """Rewards of which some are 0."""
    columns = samples(rng)
    columns["rewards"] = [[max(0.0, reward) for reward in group] for group in columns["rewards"]]
    columns["rewards"][2] = [0.0, 1.0, 0.5]
    return columns


def unrewarded_samples(rng: np.random.Generator, *fields: str) -> Columns:
    return {name: rows for name, rows in samples(rng, *fields).items() if name != "rewards"}
