"""Scored groups without end, for training while generation goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gradwire.rl.algorithms.collecting import Collected, has_spread, joined
from gradwire.rl.replay import written_at
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")


@dataclass(frozen=True)
class StreamSettings:
    """How a stream goes.

    Attributes:
        first_group: number of the first group.
        minibatches: groups of each minibatch of an iteration.
        ahead: groups that may have been started and not yet been trained on.
        parallel: groups under way at once.
        max_staleness: optimizer steps that a group's oldest token may be behind when it is trained on; None: any.
        spread: drop groups whose rewards are all equal.
        patience: groups dropped for one minibatch, after which it goes on with what there is.
    """

    first_group: int
    minibatches: Sequence[int]
    ahead: int
    parallel: int
    max_staleness: int | None
    spread: bool
    patience: int


class GroupStream:
    """Groups of episodes without end, in the order in which they are done; generation goes on while others train.

    An episode that is under way while the policy learns goes on with the newer one: each step knows which version
    wrote it. What is dropped is replaced by the next task's group.

    Args:
        collect: the number of a group -> the group, scored.
        version: optimizer steps that the policy has taken now.
        settings: see there.
    """

    streaming = True

    def __init__(
        self,
        collect: Callable[[int], Coroutine[Any, Any, Collected]],
        version: Callable[[], int],
        settings: StreamSettings,
    ) -> None:
        self._collect, self._version, self._settings = collect, version, settings
        self._next = settings.first_group
        self._waiting = 0  # done, or under way, and not trained on
        self._under_way: set[asyncio.Task[Collected]] = set()
        self._done: asyncio.Queue[asyncio.Task[Collected]] = asyncio.Queue()

    async def parts(self, iteration: int) -> AsyncIterator[Collected]:
        for size in self._settings.minibatches:
            kept, aside = await self._minibatch(size)
            yield joined([*kept, *aside])
            self._release(len(kept))

    async def _minibatch(self, size: int) -> tuple[list[Collected], list[Collected]]:
        """Groups to train on, and those that were dropped on the way."""
        kept: list[Collected] = []
        aside: list[Collected] = []
        while len(kept) < size and len(aside) < self._settings.patience:
            self._fill()
            group = await (await self._done.get())
            reason = self._unfit(group.trajectories)
            if not reason:
                kept.append(group)
            else:
                dropped = {**group.metrics, f"rollouts/{reason}": 1.0}
                aside.append(Collected([], dropped, group.trajectories))
                self._release(1)
        if len(kept) < size:
            logger.warning(
                "%d groups were dropped for one minibatch, which goes on with %d of %d: without spread in their "
                "rewards they teach nothing. Are the tasks too easy or too hard?", len(aside), len(kept), size,
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

    def _settle(self, task: asyncio.Task[Collected]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            self._done.put_nowait(task)
            self._fill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._settings = StreamSettings(0, (), 0, 0, None, False, 0)  # nothing more is started
        tasks = tuple(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
