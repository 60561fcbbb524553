"""GRPO: the mean reward of a task's group of trajectories is the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradwire.rl.advantages import GROUP_STD_FLOOR, group_advantages, group_spread, rloo_advantages
from gradwire.rl.algorithms.base import Algorithm
from gradwire.rl.metrics import Mean, Metric, Sum
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rows import (
    OF_GROUPS,
    TrainingBatch,
    grouped_columns,
    rows_of,
    share_prompts,
    trajectory_weights,
)
from gradwire.rl.types import Trajectory

OF_SERVER = ("advantage_scale", "whiten_advantages", "kl_in_reward", "mask_zero_spread")
"""Arguments of the loss that need the rewards of whole groups in its batch."""


def write_group_advantages(trajectories: Sequence[Trajectory], kwargs: Mapping[str, Any]) -> np.ndarray:
    """Compute each trajectory's advantage within its group, ``[trajectories]``, and write it into the trajectory's
    steps. A trajectory counts once, however many rows it has.

    Args:
        kwargs: Arguments of the loss: ``baseline``, ``scale_rewards`` and ``scale_epsilon`` mean what they do there.
    """
    groups = by_group(trajectories)
    ordered, sizes = [each for group in groups for each in group], [len(group) for group in groups]
    rewards = np.array([each.reward for each in ordered], np.float64)
    if kwargs.get("baseline") == "leave_one_out":
        advantages = rloo_advantages(rewards, sizes)
    else:
        advantages = group_advantages(rewards, sizes, scale=False)
    scale = kwargs.get("scale_rewards", True)
    if scale and len(rewards):
        deviations = np.repeat(group_spread(rewards, sizes)[1], sizes)
        if scale == "batch":
            deviations[:] = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        floor = kwargs.get("scale_epsilon", GROUP_STD_FLOOR)
        advantages = advantages / np.where(deviations > 0, deviations + floor, 1.0)
    found = {id(each): advantage for each, advantage in zip(ordered, advantages)}
    for each in trajectories:
        for step in each.steps:
            step.advantage = float(found[id(each)])
    return np.array([found[id(each)] for each in trajectories])


def idle_groups(trajectories: Sequence[Trajectory]) -> Mean:
    """Share of groups whose rewards are all equal and which therefore give no gradient."""
    groups = by_group(trajectories)
    return Mean(sum(len({each.reward for each in group}) == 1 for group in groups), len(groups))


class GRPOAlgorithm(Algorithm):
    """Group relative policy optimisation (loss ``grpo``; its options go in ``config.loss_kwargs``).

    If each trajectory of a group is one row from one prompt, the server computes the advantages; otherwise
    (prompts that do not continue each other, branches of an agent's rollout) they are computed here and sent with each
    row. A trajectory then counts once, in its group's baseline and in the mean over sequences.
    """

    loss_fn = "grpo"
    compares_groups = True
    takes_own_logprobs = True

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        kwargs = self._loss_kwargs()
        advantages = write_group_advantages(trajectories, kwargs)
        rows = rows_of(trajectories)
        shared = share_prompts(rows, trajectories)
        weights = dict(zip(map(id, rows), trajectory_weights(rows, kwargs.get("reduction", "sequence_mean"))))
        if not shared:
            self._tell_of_ignored(kwargs)

        def fields(row: Any) -> dict[str, Any]:
            return {} if shared else {"advantages": float(advantages[row.trajectory] * weights[id(row)])}

        kwargs, trained = await self._corrected(rows, trajectories, kwargs)
        columns = grouped_columns(rows, trajectories, fields, trained, bool(kwargs.get("sampler_correction")))
        metrics: dict[str, Metric | float] = {"rows": Sum(len(rows)), "idle_groups": idle_groups(trajectories)}
        return TrainingBatch(self.loss_fn, kwargs, columns, metrics, () if shared else OF_GROUPS)

    def _tell_of_ignored(self, kwargs: Mapping[str, Any]) -> None:
        ignored = [name for name in OF_SERVER if kwargs.get(name)]
        if kwargs.get("baseline") == "length_weighted":
            ignored.append("baseline")
        if ignored:
            self._reporter.warn_once(
                "ignored",
                "%s of loss_kwargs has no effect where a group's trajectories have several rows or different prompts: "
                "advantages are then computed by the client",
                " and ".join(ignored),
            )
