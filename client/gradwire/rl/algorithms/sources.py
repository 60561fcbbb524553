"""Where scored groups come from: collections that run while the policy trains, bounded by how old groups may become.

    ledger --give out--> open groups --collect, score--> collected groups --part by part--> the training
       ^                 (at most ``pace.most``)                                               |
       +------------------------------ settle: trained, or dropped and why --------------------+

One source serves every mode; a :class:`Pace` says what differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.errors import GradwireError
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.ledger import Group, Ledger
from gradwire.rl.algorithms.scored_rollouts import Manager, collect_scored
from gradwire.rl.batching import derive_seed
from gradwire.rl.metrics import Metric, Sum, merged
from gradwire.rl.replay import written_at
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Trajectory

PATIENCE_S = 60.0
"""Seconds without a collected group after which the log says what the training waits for."""
logger = logging.getLogger("gradwire.rl")


@dataclass(frozen=True)
class Pace:
    """How groups are collected and handed out.

    Attributes:
        sizes: Groups in each part of an iteration.
        lag: Parts that may be trained on between the beginning of a group's collection and its own training.
        in_order: Groups are handed out in the order of the tasks, and collected ``max(sizes)`` at a time; otherwise in
            the order in which they are done, each collected alone.
        parallel: Collections in progress at once.
        max_age: Age in optimizer steps beyond which a group is dropped; None: none is, the training waits for it in
            time.
    """

    sizes: Sequence[int]
    lag: int
    in_order: bool
    parallel: int
    max_age: int | None = None

    @property
    def most(self) -> int:
        """Groups that may be open."""
        return max(self.sizes) + min(self.sizes) * self.lag

    @staticmethod
    def sync(config: AlgorithmConfig) -> Pace:
        """Whole iterations, up to ``config.max_staleness`` of them ahead."""
        return Pace([config.batch_size], config.max_staleness, in_order=True, parallel=1 + config.max_staleness)

    @staticmethod
    def stream(config: AlgorithmConfig, max_staleness: int) -> Pace:
        """Minibatch by minibatch; ``max_staleness`` is in optimizer steps."""
        parts = np.array_split(range(config.batch_size), config.num_minibatches)
        sizes = [len(part) for part in parts if len(part)]
        passes, accumulated = config.ppo_epochs, config.gradient_accumulation_steps
        per_part, per_iteration = -(-passes // accumulated), -(-passes * len(sizes) // accumulated)
        lag = max(max_staleness // per_part, max_staleness // per_iteration * len(sizes))
        parallel = max(1, config.num_parallel // config.group_size)
        max_age = max_staleness if config.on_stale == "drop" else None
        return Pace(sizes, lag, in_order=False, parallel=parallel, max_age=max_age)


@dataclass(frozen=True)
class Part:
    """The groups for the next training steps.

    Attributes:
        groups: The groups to train on.
        aside: Groups that are not trained on, with the reason.
    """

    groups: list[Group]
    aside: list[tuple[Group, str]]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each for group in self.groups for each in group.trajectories]

    @property
    def everything(self) -> list[Trajectory]:
        """The trajectories of those set aside as well."""
        return self.trajectories + [each for group, _ in self.aside for each in group.trajectories]

    @property
    def metrics(self) -> dict[str, Metric]:
        groups = (*self.groups, *(group for group, _ in self.aside))
        dropped = ({f"rollouts/{reason}": Sum(1)} for _, reason in self.aside)
        return merged([*(group.metrics for group in groups), *dropped])


class Source:
    """Collects the groups of a ledger and hands them out.

    Args:
        manager: Collects the trajectories.
        reward: Scores them.
        ledger: Gives out the tasks.
        config: The algorithm's settings.
        version: Returns the number of optimizer steps that the policy has taken.
    """

    def __init__(
        self,
        manager: Manager,
        reward: RewardComputer,
        ledger: Ledger,
        config: AlgorithmConfig,
        version: Callable[[], int],
    ) -> None:
        self.manager, self.ledger = manager, ledger
        self._reward, self._config, self._version = reward, config, version
        self._pace = Pace.sync(config)
        self._working = False
        self._needed = self._training = 0
        self._held: set[Group] = set()
        self._running: dict[asyncio.Task[None], Sequence[Group]] = {}
        self._failure: BaseException | None = None
        self._shared: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def working(self, pace: Pace, iterations: int) -> AsyncIterator[None]:
        """Collect within the body, as many groups as these iterations need and none beyond.

        What an error leaves behind stays in the ledger and is the first of the next call.
        """
        self._pace, self._needed, self._training, self._failure = pace, iterations * sum(pace.sizes), 0, None
        self._shared = {}
        if not pace.in_order and isinstance(self.manager, RolloutManager):
            self._shared = {"batcher": self.manager.batcher(self._config.seed, deterministic=False)}
        for group in self.ledger.open.values():
            group.turn = None if group.collected is None else group.turn
        self._working = True
        try:
            yield
        finally:
            self._working = False
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._held.clear()

    async def parts(self) -> AsyncGenerator[Part]:
        """Yield the parts of an iteration.

        The caller settles the groups of a part, at the latest when the iteration ends; those that it does not settle
        because of an error are handed out again.
        """
        for size in self._pace.sizes:
            part = Part([], [])
            while len(part.groups) < size:
                group = await self._next(size - len(part.groups))
                self._held.add(group)
                if reason := self._unfit(group.trajectories):
                    part.aside.append((group, reason))
                    if len(part.aside) >= self._config.max_resampling * self._config.batch_size:
                        self._warn_of(part, size)
                        break
                else:
                    part.groups.append(group)
                    self._training = len(part.groups)
                    self._needed -= 1
            self._needed -= size - len(part.groups)
            try:
                yield part
            finally:
                self._training = 0
                self.ledger.turn += 1
        self._held.clear()

    def _unfit(self, trajectories: Sequence[Trajectory]) -> str:
        """The reason why a group is not trained on; empty if it is."""
        oldest = self._pace.max_age
        if oldest is not None and trajectories and self._version() - written_at(trajectories) > oldest:
            return "too_stale"
        if not self._config.dynamic_sampling or has_spread(trajectories):
            return ""
        return "without_spread" if any(each.ok for each in trajectories) else "all_failed"

    def _warn_of(self, part: Part, size: int) -> None:
        logger.warning(
            "%d groups were dropped for one minibatch, which goes on with %d of %d: groups of equal rewards give no "
            "gradient. Are the tasks too easy or too hard?", len(part.aside), len(part.groups), size,
        )  # fmt: skip

    async def _next(self, places: int) -> Group:
        """Wait for a group that may take one of the places that are left in a part."""
        while True:
            self._fill()
            allowed = self._allowed(places)
            done = {group.collected: group for group in allowed if group.collected is not None}
            if done:
                return done[min(done)]
            await self._progress(allowed)

    @property
    def _waiting(self) -> list[Group]:
        """Open groups that are not handed out, in the order of the tasks."""
        return [group for group in self.ledger.open.values() if group not in self._held]

    def _fill(self) -> None:
        """Give out as many groups as may be open, and begin the collections for which there is room."""
        waiting = len(self._waiting)
        self.ledger.give_out(max(0, min(self._pace.most - self._training, self._needed) - waiting))
        begun = {group for groups in self._running.values() for group in groups}
        for groups in self._batches([each for each in self._waiting if each.collected is None and each not in begun]):
            if len(self._running) >= self._pace.parallel:
                break
            for group in groups:
                group.turn = self.ledger.turn
            task = asyncio.create_task(self._collect(groups))
            self._running[task] = groups
            task.add_done_callback(self._ended)

    def _batches(self, groups: Sequence[Group]) -> Iterator[Sequence[Group]]:
        """Yield groups that are collected together; their numbers follow each other."""
        most = max(self._pace.sizes) if self._pace.in_order else 1
        for _, run in itertools.groupby(enumerate(groups), lambda each: each[1].number - each[0]):
            following = [group for _, group in run]
            yield from (following[at : at + most] for at in range(0, len(following), most))

    def _ended(self, task: asyncio.Task[None]) -> None:
        first = self._running.pop(task)[0]
        if not self._working:
            return
        if task.cancelled():
            self._failure = GradwireError(f"group {first.number}, of the task {first.task.key!r:.100}, was cancelled")
        elif error := task.exception():
            self._failure = self._failure or error
        else:
            self._fill()

    def _allowed(self, places: int) -> list[Group]:
        """Groups that may take the next place such that none becomes older than allowed.

        Each group has a deadline, the last part that may still have it. Where the groups up to a deadline are as many
        as the places until then, one of these is next: the training waits for it.
        """
        pace = self._pace
        if pace.in_order:
            return self._waiting[:1]
        if pace.max_age is not None:
            return self._waiting
        left = {
            group: pace.lag if group.turn is None else min(pace.lag, max(0, group.turn + pace.lag - self.ledger.turn))
            for group in self._waiting
        }
        order = sorted(left, key=left.__getitem__)
        for count, group in enumerate(order, 1):
            if count >= places + min(pace.sizes) * left[group]:
                return order[:count]
        return order

    async def _progress(self, awaited: Sequence[Group]) -> None:
        """Wait until a collection ends.

        Raises:
            BaseException: That of a collection which failed.
        """
        while self._failure is None:
            done, _ = await asyncio.wait(self._running, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            first = awaited[0]
            logger.warning(
                "no group was done in the last %g s; the training waits for group %d, of the task %.100r. "
                "rollout_timeout_s limits an episode", PATIENCE_S, first.number, first.task.key,
            )  # fmt: skip
        if self._failure is not None:
            raise self._failure

    async def _collect(self, groups: Sequence[Group]) -> None:
        first, last = groups[0], groups[-1]
        what = f"group {first.number}" + (f" to {last.number}" if last is not first else "")
        try:
            scored = await collect_scored(
                self.manager, self._reward, [group.task for group in groups], what,
                group_size=self._config.group_size,
                params=self._config.sampling,
                seed=derive_seed(self._config.seed, "rollouts"),
                first_group=first.number,
                **self._shared,
            )  # fmt: skip
        except Exception as error:
            error.add_note(f"in {what}, of the task {first.task.key!r:.100}" + " and others" * (last is not first))
            raise
        found = {members[0].group: members for members in by_group(scored.trajectories)}
        if unknown := found.keys() - {group.number for group in groups}:
            raise ValueError(
                f"{type(self.manager).__name__}.collect() gave groups {sorted(unknown)} where it was asked for {what}: "
                "it must number them from first_group"
            )
        await self.ledger.collect(
            {group: (found.get(group.number, []), scored.metrics if group is first else {}) for group in groups}
        )


def has_spread(group: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group differ; equal rewards give no gradient to methods that compare them (dynamic
    sampling: Yu et al. 2025, DAPO)."""
    return len({each.reward for each in group if each.ok and not each.by_other}) > 1
