"""Convert trajectories to training rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.rl.metrics import Metric
from gradwire.rl.types import FloatArray, IntArray, StepData, Trajectory


@dataclass(frozen=True)
class Row:
    """Tokens of one or more steps of a trajectory.

    Attributes:
        ids: ``[tokens]``.
        written: ``[tokens]`` bool: the policy's tokens; the rest is prompt and observations.
        logprobs: ``[tokens]``, under the policy that wrote them; 0 elsewhere.
        step_of: ``[tokens]``, index of the step that wrote the token; -1 elsewhere.
        prompt_length: Number of tokens before the policy's first token.
        trajectory: Index of the trajectory in the batch.
        last: Whether this is the last row of its trajectory.
    """

    ids: IntArray
    written: npt.NDArray[np.bool_]
    logprobs: FloatArray
    step_of: IntArray
    prompt_length: int
    trajectory: int
    last: bool = True

    @property
    def ends(self) -> dict[int, int]:
        """Step -> index of its last token."""
        return {int(step): at for at, step in enumerate(self.step_of) if step >= 0}

    def spread(self, per_step: Sequence[float] | npt.NDArray[Any]) -> FloatArray:
        """``[steps of the trajectory] -> [tokens]``: each step's number at all of its tokens, 0 elsewhere."""
        numbers = np.append(np.asarray(per_step, np.float32), np.float32(0))
        return numbers[self.step_of]

    def at_ends(self, per_step: Sequence[float] | npt.NDArray[Any]) -> FloatArray:
        """``[steps of the trajectory] -> [tokens]``: each step's number at its last token, 0 elsewhere."""
        result = np.zeros(len(self.ids), np.float32)
        for step, at in self.ends.items():
            result[at] = per_step[step]
        return result


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Build the rows of all trajectories, in order.

    Consecutive steps whose prompts begin with everything that came before form one row; the observations between them
    are marked as not written by the policy. A step whose prompt does not (a shortened context, an edited conversation)
    starts another row.
    """
    rows: list[Row] = []
    for index, trajectory in enumerate(trajectories):
        parts: list[list[StepData]] = []
        seen: IntArray = np.zeros(0, np.int64)
        for step in trajectory.steps:
            if not len(step.response_ids):
                continue
            if parts and len(step.prompt_ids) >= len(seen) and np.array_equal(step.prompt_ids[: len(seen)], seen):
                parts[-1].append(step)
            else:
                parts.append([step])
            seen = np.concatenate([step.prompt_ids, step.response_ids])
        rows.extend(_row(steps, index, place == len(parts) - 1) for place, steps in enumerate(parts))
    return rows


def _row(steps: Sequence[StepData], trajectory: int, last: bool) -> Row:
    ids = np.concatenate([steps[-1].prompt_ids, steps[-1].response_ids]).astype(np.int64)
    step_of, logprobs = np.full(len(ids), -1, np.int64), np.zeros(len(ids), np.float32)
    for step in steps:
        there = slice(len(step.prompt_ids), len(step.prompt_ids) + len(step.response_ids))
        if len(step.logprobs) != len(step.response_ids):
            raise ValueError(
                f"step {step.index} has {len(step.response_ids)} tokens and {len(step.logprobs)} log-probabilities; to "
                "train on its samples, an inference module must return one log-probability per token"
            )
        step_of[there], logprobs[there] = step.index, step.logprobs
    return Row(ids, step_of >= 0, logprobs, step_of, len(steps[0].prompt_ids), trajectory, last)


@dataclass(frozen=True)
class TrainingBatch:
    """The batch of one iteration: a loss, its arguments, and columns with equal numbers of rows.

    Attributes:
        loss_fn: Name of the loss.
        loss_kwargs: Arguments of the loss.
        columns: Field -> one entry per row.
        metrics: Metrics computed while the batch was built (see :mod:`gradwire.rl.metrics`); a plain number counts as a
            mean over the batch's trajectories.
        meaningless: Names of loss metrics that are undefined for this batch.
    """

    loss_fn: str
    loss_kwargs: dict[str, Any]
    columns: dict[str, list[Any]]
    metrics: Mapping[str, Metric | float]
    meaningless: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> dict[str, list[Any]]:
        return {name: [column[row] for row in rows] for name, column in self.columns.items()}


def grouped_columns(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    fields: Callable[[Row], dict[str, Any]],
    trained_logprobs: Sequence[FloatArray] | None = None,
    corrected: bool = False,
) -> dict[str, list[Any]]:
    """Build columns of the layout ``groups``.

    If every trajectory of every group is one row from one prompt, each group is one row of samples. Otherwise every row
    is its own group, and the batch must bring its advantages.

    Args:
        rows, trajectories: As for :func:`rows_of`.
        fields: More columns, by row.
        trained_logprobs: Per row ``[tokens]``, under the policy at the start of training. Ratios are then relative to
            them (``old_log_probs``), and the sampler's own are sent as ``sampler_log_probs``, for
            ``sampler_correction``. None: ratios are relative to the sampler's, or if ``corrected`` to the policy of the
            loss's own forward.
        corrected: Whether the loss has a ``sampler_correction``.
    """
    columns: dict[str, list[Any]] = {}
    trained = {id(row): logprobs for row, logprobs in zip(rows, trained_logprobs or ())}
    for group in _groups(rows, trajectories):
        members: dict[str, list[Any]] = {
            "response_ids": [row.ids[row.prompt_length :] for row in group],
            "response_masks": [row.written[row.prompt_length :] for row in group],
            "rewards": [trajectories[row.trajectory].reward for row in group],
            "truncated": [trajectories[row.trajectory].was_cut for row in group],
        }
        if trained or not corrected:
            members["old_log_probs"] = [trained.get(id(row), row.logprobs)[row.prompt_length :] for row in group]
        if corrected:
            members["sampler_log_probs"] = [row.logprobs[row.prompt_length :] for row in group]
        for row in group:
            for name, value in fields(row).items():
                members.setdefault(name, []).append(value)
        columns.setdefault("prompt_ids", []).append(group[0].ids[: group[0].prompt_length])
        for name, values in members.items():
            columns.setdefault(name, []).append(values)
    return columns


def trajectory_weights(rows: Sequence[Row], reduction: str) -> FloatArray:
    """``[rows]``: factors of the rows' advantages with which a mean over rows is a mean over trajectories.

    A trajectory that was split into several rows then counts once: with ``sequence_mean`` by the mean over the tokens
    of all its rows, with ``sequence_mean_token_sum`` and ``fixed`` by their sum. Means and sums over tokens
    (``token_mean``, ``sum``) need none. Factors are 1 if every trajectory is one row. A KL term stays a mean over rows.
    """
    if reduction in ("token_mean", "sum") or not rows:
        return np.ones(len(rows), np.float32)
    tokens = np.array([row.written.sum() for row in rows], np.float64)
    trajectories = np.array([row.trajectory for row in rows])
    rows_per_trajectory = len(rows) / len(np.unique(trajectories))
    weights = np.full(len(rows), rows_per_trajectory)
    if reduction == "sequence_mean":
        weights *= tokens / np.bincount(trajectories, tokens)[trajectories]
    return weights.astype(np.float32)


OF_GROUPS = ("zero_spread_groups", "group_reward_std", "group_reward_mean")
"""Metrics of the group losses that are undefined if every row is its own group."""


def share_prompts(rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> bool:
    """Whether each trajectory of each group is one row, and all rows of a group share one prompt."""
    prompts: dict[int, bytes] = {}
    seen: set[int] = set()
    for row in rows:
        prompt = row.ids[: row.prompt_length].tobytes()
        if row.trajectory in seen or prompts.setdefault(trajectories[row.trajectory].group, prompt) != prompt:
            return False
        seen.add(row.trajectory)
    return True


def _groups(rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> list[list[Row]]:
    if not share_prompts(rows, trajectories):
        return [[row] for row in rows]
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(trajectories[row.trajectory].group, []).append(row)
    return list(groups.values())
