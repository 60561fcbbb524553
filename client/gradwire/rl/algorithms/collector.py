"""Collect for an algorithm: tasks from its curriculum, with its settings, scored by its reward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.rl.algorithms.collecting import Ahead, Collected, Manager, Source, collect_scored, joined, with_spread
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.stream import GroupStream, StreamSettings
from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Task

RESAMPLED = 1_000_003  # offset of iteration numbers for the tasks of resampling rounds, away from all real iterations
logger = logging.getLogger("gradwire.rl")


@dataclass(frozen=True)
class Collector:
    """Collects iteration by iteration, or as a stream of groups.

    Attributes:
        manager: The rollout manager.
        reward: Scores the trajectories.
        curriculum: Chooses the tasks.
        config: The algorithm's settings.
    """

    manager: Manager
    reward: RewardComputer
    curriculum: Curriculum
    config: AlgorithmConfig

    def ahead(self, iterations: range) -> Source:
        """Return a source of whole iterations, up to ``config.max_staleness`` of them ahead."""
        return Ahead(self.iteration, iterations, self.config.max_staleness)

    def stream(self, iteration: int, max_staleness: int, version: Callable[[], int]) -> Source:
        """Return an endless stream of groups from an iteration on; ``version``: number of optimizer steps taken by
        now."""
        config, manager = self.config, self.manager
        minibatches = [len(part) for part in np.array_split(range(config.batch_size), config.num_minibatches)]
        settings = StreamSettings(
            first_group=iteration * config.batch_size,
            minibatches=[size for size in minibatches if size],
            ahead=max(minibatches) * (1 + max_staleness // config.ppo_epochs),
            parallel=max(1, config.num_parallel // config.group_size),
            max_staleness=max_staleness if config.on_stale == "drop" else None,
            spread=config.dynamic_sampling,
            patience=config.max_resampling * config.batch_size,
        )
        shared: dict[str, Any] = {}
        if isinstance(manager, RolloutManager):
            shared = {"batcher": manager.batcher(derive_seed(config.seed, "stream", iteration), deterministic=False)}

        async def collect(group: int) -> Collected:
            tasks = self.curriculum.select(group, 1)
            return await self._collect(tasks, f"group {group}", group, "rollouts", group, **shared)

        return GroupStream(collect, version, settings)

    async def iteration(self, iteration: int) -> Collected:
        """Collect an iteration; with dynamic sampling, sample more tasks until enough groups have a spread."""
        config = self.config
        tasks = self.curriculum.select(iteration, config.batch_size)
        what, first = f"iteration {iteration}", iteration * config.batch_size
        collected = await self._collect(tasks, what, first, "rollouts", iteration)
        if not config.dynamic_sampling:
            return collected
        collected, groups = with_spread(collected), config.batch_size
        for attempt in range(1, config.max_resampling + 1):
            lacking = config.batch_size - len(by_group(collected.trajectories))
            if not lacking:
                return collected
            tasks = self.curriculum.select(iteration + attempt * RESAMPLED, lacking)
            more = await self._collect(tasks, what, first + groups, "resampled", iteration, attempt)
            collected, groups = joined([collected, with_spread(more)]), groups + lacking
        logger.warning(
            "iteration %d: rewards differ in %d of %d groups after %d rounds of resampling: are the tasks too easy or "
            "too hard?",
            iteration, len(by_group(collected.trajectories)), config.batch_size, config.max_resampling,
        )  # fmt: skip
        return collected

    async def _collect(
        self, tasks: Sequence[Task], what: str, first_group: int, *seed: int | str, **settings: Any
    ) -> Collected:
        return await collect_scored(
            self.manager, self.reward, tasks, what,
            group_size=self.config.group_size,
            params=self.config.sampling,
            seed=derive_seed(self.config.seed, *seed),
            first_group=first_group,
            **settings,
        )  # fmt: skip
