"""Rollouts with rewards: collect and score, keep the groups whose rewards differ, join several collections."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradwire.rl.generation import SamplingParams
from gradwire.rl.metrics import Elapsed, Metric, Sum, merged
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rollout_statistics import Rollouts
from gradwire.rl.types import AnyTask, Task, Trajectory

logger = logging.getLogger("gradwire.rl")


class Manager(Protocol):
    """Collects trajectories: a ``RolloutManager``, a ``RayRolloutManager``, or the user's own."""

    async def collect(
        self,
        tasks: Iterable[AnyTask],
        *,
        group_size: int | None = None,
        params: SamplingParams | None = None,
        seed: int | None = None,
        first_group: int = 0,
    ) -> Rollouts: ...


@dataclass(frozen=True)
class ScoredRollouts:
    """Trajectories with their rewards, and the metrics of the collection.

    Attributes:
        trajectories: Trajectories to train on.
        metrics: Metrics over all collected trajectories, before they are merged with those of other parts.
        set_aside: Scored trajectories that are not trained on: groups without spread and groups that are too old.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, Metric]
    set_aside: list[Trajectory] = field(default_factory=list)


async def collect_scored(
    manager: Manager, reward: RewardComputer, tasks: Sequence[Task], what: str, **settings: Any
) -> ScoredRollouts:
    """Collect and score episodes of these tasks. Each kind of failure is logged once, with its count.

    Args:
        what: Prefix of log messages, such as ``"iteration 3"``.
        settings: Settings of :meth:`~gradwire.rl.rollouts.RolloutManager.collect`.
    """
    began = time.monotonic()
    rollouts = await manager.collect(tasks, **settings)
    ended = time.monotonic()
    report = await reward.compute(rollouts.trajectories)
    for error, count in {**rollouts.errors, **report.errors}.items():
        logger.warning("%s: %d of %d trajectories: %s", what, count, len(rollouts.trajectories), error)
    statistics = rollouts.statistics
    measured: dict[str, Metric] = {
        "rollouts/seconds": Elapsed(began, ended),
        "rollouts/tokens_per_second": Elapsed(began, ended, statistics.sampler.tokens),
    }
    return ScoredRollouts(rollouts.trajectories, {**statistics.merging(), **measured, **report.merging})


def has_spread(group: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group differ; equal rewards give no gradient to methods that compare them."""
    return len({each.reward for each in group if each.ok}) > 1


def with_spread(collected: ScoredRollouts) -> ScoredRollouts:
    """Keep only the groups whose rewards differ and set the others aside (dynamic sampling: Yu et al. 2025, DAPO)."""
    groups = by_group(collected.trajectories)
    kept = [each for group in groups if has_spread(group) for each in group]
    aside = [each for group in groups if not has_spread(group) for each in group]
    metrics = {**collected.metrics, "rollouts/without_spread": Sum(len(groups) - len(by_group(kept)))}
    return ScoredRollouts(kept, metrics, [*collected.set_aside, *aside])


def joined(parts: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """Join several collections."""
    return ScoredRollouts(
        [each for part in parts for each in part.trajectories],
        merged([part.metrics for part in parts]),
        [each for part in parts for each in part.set_aside],
    )
