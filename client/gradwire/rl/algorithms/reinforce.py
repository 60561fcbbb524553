"""REINFORCE with a baseline, for samples of any policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import numpy as np

from gradwire.rl.advantages import group_advantages, rloo_advantages, whiten
from gradwire.rl.algorithms.base import Algorithm, AlgorithmOptions
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.metrics import Metric, Std, Sum
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rows import TrainingBatch, rows_of, trajectory_weights
from gradwire.rl.types import Trajectory

Baseline = Literal["leave_one_out", "group_mean", "batch", "none"]


class REINFORCEAlgorithm(Algorithm):
    """The policy gradient with a baseline and importance weights (loss ``importance_sampling``).

    Ratios are relative to the sampler's own log-probabilities and truncated, so rollouts may be stale and trajectories
    of a :class:`~gradwire.rl.replay.ReplayBuffer` may be mixed in (``config.replay_fraction``).

    Args:
        baseline: The baseline of a reward. ``leave_one_out``: the mean of the others of its group (RLOO).
            ``group_mean``: the group's mean. ``batch``: the batch's mean, divided by its standard deviation
            (REINFORCE++ without KL). ``none``: no baseline.
        options: See :class:`~gradwire.rl.AlgorithmOptions`.
    """

    replays = True

    def __init__(
        self,
        service: Any,
        run: Any,
        tasks: Any,
        reward: Any,
        config: AlgorithmConfig | None = None,
        *,
        baseline: Baseline = "leave_one_out",
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        super().__init__(service, run, tasks, reward, config, **options)
        if baseline not in ("leave_one_out", "group_mean", "batch", "none"):
            raise ValueError(f"baseline must be leave_one_out, group_mean, batch or none, got {baseline!r}")
        if baseline in ("leave_one_out", "group_mean") and self.config.group_size == 1:
            raise ValueError(
                f'baseline {baseline!r} compares within a group: set group_size to at least 2, or baseline="batch"'
            )
        self.baseline = baseline

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        groups = by_group(trajectories)
        ordered = [each for group in groups for each in group]
        rewards, sizes = [each.reward for each in ordered], [len(group) for group in groups]
        match self.baseline:
            case "leave_one_out":
                advantages = rloo_advantages(rewards, sizes)
            case "group_mean":
                advantages = group_advantages(rewards, sizes, scale=False)
            case "batch":
                advantages = whiten(rewards)
            case _:
                advantages = np.asarray(rewards, np.float64)
        for each, advantage in zip(ordered, advantages):
            for step in each.steps:
                step.advantage = float(advantage)
        rows = rows_of(ordered)
        kwargs = {"clip_ratio": 2.0, **self.config.kl_kwargs(), **self.config.loss_kwargs}
        weights = trajectory_weights(rows, kwargs.get("reduction", "token_mean"))
        columns: dict[str, list[Any]] = {
            "input_ids": [row.ids for row in rows],
            "loss_mask": [row.written for row in rows],
            "behavior_log_probs": [row.logprobs for row in rows],
            "advantages": [float(advantages[row.trajectory] * weight) for row, weight in zip(rows, weights)],
        }
        metrics: dict[str, Metric | float] = {"rows": Sum(len(rows)), "advantage_std": Std.of(advantages)}
        return TrainingBatch("importance_sampling", kwargs, columns if rows else {}, metrics)
