"""GRPO: the mean reward of a task's group of trajectories is the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.rl.advantages import group_advantages
from gradwire.rl.algorithms.base import Algorithm
from gradwire.rl.metrics import Mean, Metric, Sum
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rows import OF_GROUPS, TrainingBatch, grouped_columns, rows_of, share_prompts
from gradwire.rl.types import Trajectory


def write_group_advantages(trajectories: Sequence[Trajectory], *, scale: bool) -> np.ndarray:
    """Compute each trajectory's advantage within its group, ``[trajectories]``, and write it into the trajectory's
    steps."""
    order = {id(each): place for place, each in enumerate(trajectories)}
    result = np.zeros(len(trajectories))
    for group in by_group(trajectories):
        advantages = group_advantages([each.reward for each in group], [len(group)], scale=scale)
        for each, advantage in zip(group, advantages):
            result[order[id(each)]] = advantage
            for step in each.steps:
                step.advantage = float(advantage)
    return result


def idle_groups(trajectories: Sequence[Trajectory]) -> Mean:
    """Share of groups whose rewards are all equal and which therefore give no gradient."""
    groups = by_group(trajectories)
    return Mean(sum(len({each.reward for each in group}) == 1 for group in groups), len(groups))


class GRPOAlgorithm(Algorithm):
    """Group relative policy optimisation (loss ``grpo``; its options go in ``config.loss_kwargs``).

    If each trajectory of a group is one row from one prompt, the server computes the advantages; otherwise
    (prompts that do not continue each other) they are computed here and sent with each row.
    """

    loss_fn = "grpo"
    corrects = True
    compares_groups = True

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        kwargs = self._loss_kwargs()
        advantages = write_group_advantages(trajectories, scale=bool(kwargs.get("scale_rewards", True)))
        rows = rows_of(trajectories)
        shared = share_prompts(rows, trajectories)

        def fields(row: Any) -> dict[str, Any]:
            return {} if shared else {"advantages": float(advantages[row.trajectory])}

        kwargs, trained = await self._sampler_correction.apply(rows, kwargs)
        columns = grouped_columns(rows, trajectories, fields, trained)
        metrics: dict[str, Metric | float] = {"rows": Sum(len(rows)), "idle_groups": idle_groups(trajectories)}
        return TrainingBatch(self.loss_fn, kwargs, columns, metrics, () if shared else OF_GROUPS)
