"""An iteration's rollouts with their rewards, collected ahead of the training as far as staleness allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Task, Trajectory

logger = logging.getLogger("gradwire.rl")

Metrics = dict[str, float]


@dataclass(frozen=True)
class Collected:
    """Trajectories with their rewards, and what was found on the way."""

    trajectories: list[Trajectory]
    metrics: Metrics


async def collect_scored(
    manager: RolloutManager, reward: RewardComputer, tasks: Sequence[Task], what: str, **settings: Any
) -> Collected:
    """Episodes of these tasks, scored. Each kind of failure is logged once, with how many it cost.

    Args:
        what: said in the log, such as ``"iteration 3"``.
        settings: of :meth:`~gradwire.rl.rollouts.RolloutManager.collect`.
    """
    rollouts = await manager.collect(tasks, **settings)
    report = await reward.compute(rollouts.trajectories)
    for error, count in {**rollouts.errors, **report.errors}.items():
        logger.warning("%s: %d of %d trajectories: %s", what, count, len(rollouts.trajectories), error)
    return Collected(rollouts.trajectories, {**rollouts.statistics.metrics(), **report.metrics})


class Ahead:
    """Runs ``collect`` for one iteration after the other, up to ``staleness`` of them before they are asked for."""

    def __init__(
        self, collect: Callable[[int], Coroutine[Any, Any, Collected]], iterations: range, staleness: int
    ) -> None:
        self._collect, self._iterations, self._staleness = collect, iterations, staleness
        self._under_way: dict[int, asyncio.Task[Collected]] = {}

    async def take(self, iteration: int) -> Collected:
        """This iteration's; those that may be collected meanwhile are begun."""
        for number in range(iteration, min(iteration + self._staleness + 1, self._iterations.stop)):
            if number not in self._under_way:
                self._under_way[number] = asyncio.create_task(self._collect(number))
        return await self._under_way.pop(iteration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
