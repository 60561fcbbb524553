"""An endless stream of scored groups, for training while generation continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gradwire.rl.algorithms.collecting import Collected, has_spread, joined
from gradwire.rl.metrics import Sum
from gradwire.rl.replay import written_at
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")


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
        collect: Callable[[int], Coroutine[Any, Any, Collected]],
        version: Callable[[], int],
        settings: StreamSettings,
    ) -> None:
        self._collect, self._version, self._settings = collect, version, settings
        self._next = settings.first_group
        self._waiting = 0  # completed or in progress, and not trained on
        self._under_way: set[asyncio.Task[Collected]] = set()
        self._done: asyncio.Queue[asyncio.Task[Collected]] = asyncio.Queue()

    async def parts(self, iteration: int) -> AsyncIterator[Collected]:
        for size in self._settings.minibatches:
            kept, aside = await self._minibatch(size)
            yield joined([*kept, *aside])
            self._release(len(kept))

    async def _minibatch(self, size: int) -> tuple[list[Collected], list[Collected]]:
        """Return the groups to train on, and those that were dropped on the way."""
        kept: list[Collected] = []
        aside: list[Collected] = []
        while len(kept) < size and len(aside) < self._settings.patience:
            self._fill()
            group = await (await self._done.get())
            reason = self._unfit(group.trajectories)
            if not reason:
                kept.append(group)
            else:
                dropped = {**group.metrics, f"rollouts/{reason}": Sum(1)}
                aside.append(Collected([], dropped, group.trajectories))
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

    def _settle(self, task: asyncio.Task[Collected]) -> None:
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
