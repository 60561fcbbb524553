"""GRPO: a group of trajectories of one task is its own baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.rl.advantages import group_advantages
from gradwire.rl.algorithms.base import Algorithm
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rows import OF_GROUPS, TrainingBatch, grouped_columns, rows_of, share_prompts
from gradwire.rl.types import Trajectory


def write_group_advantages(trajectories: Sequence[Trajectory], *, scale: bool) -> np.ndarray:
    """``[trajectories]``: of each, within its group; also written into its steps."""
    order = {id(each): place for place, each in enumerate(trajectories)}
    result = np.zeros(len(trajectories))
    for group in by_group(trajectories):
        advantages = group_advantages([each.reward for each in group], [len(group)], scale=scale)
        for each, advantage in zip(group, advantages):
            result[order[id(each)]] = advantage
            for step in each.steps:
                step.advantage = float(advantage)
    return result


def idle_groups(trajectories: Sequence[Trajectory]) -> float:
    """Share of groups whose rewards are all equal: their trajectories teach nothing."""
    groups = by_group(trajectories)
    return sum(len({each.reward for each in group}) == 1 for group in groups) / max(len(groups), 1)


class GRPOAlgorithm(Algorithm):
    """Group relative policy optimisation (loss ``grpo``; its options go in ``config.loss_kwargs``).

    Where a group's trajectories are one row each, from one prompt, the server finds the advantages; where they are not
    (prompts that do not continue each other), they are found here, and go along with each row.
    """

    loss_fn = "grpo"
    corrects = True

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        kwargs = self._loss_kwargs()
        advantages = write_group_advantages(trajectories, scale=bool(kwargs.get("scale_rewards", True)))
        rows = rows_of(trajectories)
        shared = share_prompts(rows, trajectories)

        def fields(row: Any) -> dict[str, Any]:
            return {} if shared else {"advantages": float(advantages[row.trajectory])}

        columns = grouped_columns(rows, trajectories, fields, await self._trained_logprobs(rows, kwargs))
        metrics = {"rows": float(len(rows)), "idle_groups": idle_groups(trajectories)}
        return TrainingBatch(self.loss_fn, kwargs, columns, metrics, () if shared else OF_GROUPS)
