"""Where scored rollouts come from: whole iterations, some of them ahead, or an endless stream of groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.scored_rollouts import (
    Manager,
    ScoredRollouts,
    collect_scored,
    has_spread,
    joined,
    with_spread,
)
from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum
from gradwire.rl.metrics import Sum
from gradwire.rl.replay import written_at
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Task, Trajectory

RESAMPLED = 1_000_003  # offset of iteration numbers for the tasks of resampling rounds, away from all real iterations
logger = logging.getLogger("gradwire.rl")


class Source(Protocol):
    """The trajectories of an iteration, in one part or in minibatches that are trained on as they arrive.

    The next part is requested when the last has been trained on.
    """

    streaming: bool

    def parts(self, iteration: int) -> AsyncIterator[ScoredRollouts]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class Ahead:
    """Runs ``collect`` for successive iterations, up to ``staleness`` iterations ahead."""

    streaming = False

    def __init__(
        self, collect: Callable[[int], Coroutine[Any, Any, ScoredRollouts]], iterations: range, staleness: int
    ) -> None:
        self._collect, self._iterations, self._staleness = collect, iterations, staleness
        self._under_way: dict[int, asyncio.Task[ScoredRollouts]] = {}

    async def parts(self, iteration: int) -> AsyncIterator[ScoredRollouts]:
        """Yield this iteration's trajectories in one part; starts the collections that may run meanwhile."""
        for number in range(iteration, min(iteration + self._staleness + 1, self._iterations.stop)):
            if number not in self._under_way:
                self._under_way[number] = asyncio.create_task(self._collect(number))
        yield await self._under_way.pop(iteration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a stream.

    Attributes:
        first_group: Number of the first group.
        minibatches: Number of groups in each minibatch of an iteration.
        ahead: Maximum number of groups that are started but not yet trained on.
        parallel: Groups in progress at once.
        max_staleness: Maximum age of a group's oldest token, in optimizer steps, when it is trained on; None: any.
        spread: Drop groups whose rewards are all equal.
        patience: Groups dropped for one minibatch, after which it goes on with fewer groups.
    """

    first_group: int
    minibatches: Sequence[int]
    ahead: int
    parallel: int
    max_staleness: int | None
    spread: bool
    patience: int


class GroupStream:
    """An endless stream of groups, in the order of completion; generation continues while the policy trains.

    Episodes in progress continue with the newer policy: each step records the version that
    wrote it. A dropped group is replaced by the next task's group.

    Args:
        collect: Maps the number of a group to the scored group.
        version: Returns the number of optimizer steps that the policy has taken.
        settings: See :class:`StreamSettings`.
    """

    streaming = True

    def __init__(
        self,
        collect: Callable[[int], Coroutine[Any, Any, ScoredRollouts]],
        version: Callable[[], int],
        settings: StreamSettings,
    ) -> None:
        self._collect, self._version, self._settings = collect, version, settings
        self._next = settings.first_group
        self._waiting = 0  # completed or in progress, and not trained on
        self._under_way: set[asyncio.Task[ScoredRollouts]] = set()
        self._done: asyncio.Queue[asyncio.Task[ScoredRollouts]] = asyncio.Queue()

    async def parts(self, iteration: int) -> AsyncIterator[ScoredRollouts]:
        for size in self._settings.minibatches:
            kept, aside = await self._minibatch(size)
            yield joined([*kept, *aside])
            self._release(len(kept))

    async def _minibatch(self, size: int) -> tuple[list[ScoredRollouts], list[ScoredRollouts]]:
        """Return the groups to train on, and those that were dropped on the way."""
        kept: list[ScoredRollouts] = []
        aside: list[ScoredRollouts] = []
        while len(kept) < size and len(aside) < self._settings.patience:
            self._fill()
            group = await (await self._done.get())
            reason = self._unfit(group.trajectories)
            if not reason:
                kept.append(group)
            else:
                dropped = {**group.metrics, f"rollouts/{reason}": Sum(1)}
                aside.append(ScoredRollouts([], dropped, group.trajectories))
                self._release(1)
        if len(kept) < size:
            logger.warning(
                "%d groups were dropped for one minibatch, which goes on with %d of %d: groups of equal "
                "rewards give no gradient. Are the tasks too easy or too hard?", len(aside), len(kept), size,
            )  # fmt: skip
        return kept, aside

    def _unfit(self, group: Sequence[Trajectory]) -> str:
        limit = self._settings.max_staleness
        if limit is not None and group and self._version() - written_at(group) > limit:
            return "too_stale"
        return "without_spread" if self._settings.spread and not has_spread(group) else ""

    def _release(self, groups: int) -> None:
        self._waiting -= groups
        self._fill()

    def _fill(self) -> None:
        while self._waiting < self._settings.ahead and len(self._under_way) < self._settings.parallel:
            task = asyncio.create_task(self._collect(self._next))
            self._next += 1
            self._waiting += 1
            self._under_way.add(task)
            task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[ScoredRollouts]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            self._done.put_nowait(task)
            self._fill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._settings = StreamSettings(0, (), 0, 0, None, False, 0)  # no new groups are started
        tasks = tuple(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Sources:
    """Makes the sources of an algorithm: tasks from its curriculum, with its settings, scored by its reward.

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

        async def collect(group: int) -> ScoredRollouts:
            tasks = self.curriculum.select(group, 1)
            return await self._collect(tasks, f"group {group}", group, "rollouts", group, **shared)

        return GroupStream(collect, version, settings)

    async def iteration(self, iteration: int) -> ScoredRollouts:
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
    ) -> ScoredRollouts:
        return await collect_scored(
            self.manager, self.reward, tasks, what,
            group_size=self.config.group_size,
            params=self.config.sampling,
            seed=derive_seed(self.config.seed, *seed),
            first_group=first_group,
            **settings,
        )  # fmt: skip
