"""Rollouts with rewards: collect episodes and score them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gradwire.errors import GradwireError
from gradwire.rl.generation import SamplingParams
from gradwire.rl.metrics import Elapsed, Metric
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rollout_statistics import Rollouts
from gradwire.rl.threads import is_cancelled
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
    """Trajectories with their rewards, and the metrics of the collection."""

    trajectories: list[Trajectory]
    metrics: Mapping[str, Metric]


async def collect_scored(
    manager: Manager, reward: RewardComputer, tasks: Sequence[Task], what: str, **settings: Any
) -> ScoredRollouts:
    """Collect and score episodes of these tasks. Each kind of failure is logged once, with its count.

    Args:
        what: Prefix of log messages, such as ``"group 3"``.
        settings: Settings of :meth:`~gradwire.rl.rollouts.RolloutManager.collect`.
    """
    began = time.monotonic()
    rollouts = await manager.collect(tasks, **settings)
    ended = time.monotonic()
    try:
        report = await reward.compute(rollouts.trajectories)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise GradwireError(f"{what}: the reward awaited something that was cancelled") from None
    for error, count in {**rollouts.errors, **report.errors}.items():
        logger.warning("%s: %d of %d trajectories: %s", what, count, len(rollouts.trajectories), error)
    statistics = rollouts.statistics
    measured: dict[str, Metric] = {
        "rollouts/seconds": Elapsed(began, ended),
        "rollouts/tokens_per_second": Elapsed(began, ended, statistics.sampler.tokens),
    }
    return ScoredRollouts(rollouts.trajectories, {**statistics.merging(), **measured, **report.merging})
