"""Fair turns between API keys at something that serves few at a time, or has room for few bytes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

SHARED_S = 60.0
"""A key counts as active this many seconds after its last request."""


class ActiveKeys:
    """The keys that have asked for something lately.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}

    def asked(self, key: str) -> None:
        """Note a request of a key."""
        self._asked[key] = self._clock()

    @property
    def several(self) -> bool:
        """Whether several keys are active."""
        if len(self._asked) > 1:
            since = self._clock() - SHARED_S
            self._asked = {key: at for key, at in self._asked.items() if at >= since}
        return len(self._asked) > 1


class Turns:
    """Turns at one resource. A free place goes to the waiting key that was served least recently.

    A turn takes one place, or as many as it asks for (bytes, for example). One that asks for more than there are waits
    until its key holds nothing else.

    Args:
        of_key: Places that one key may hold at this moment, or always; its further turns wait, in the order in which
            they were asked for.
        total: Places that all keys together may hold; None: no limit.
    """

    def __init__(self, of_key: int | Callable[[], int], total: int | None = None) -> None:
        self._of_key = of_key if callable(of_key) else partial(int, of_key)
        self._total = total
        self._held: Counter[str] = Counter()
        self._count = 0
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._served: dict[str, int] = {}
        self._number = 0

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it in the body."""
        await self.take(key)
        try:
            yield
        finally:
            self.give_back(key)

    async def take(self, key: str, places: int = 1) -> None:
        """Wait for a turn; :meth:`give_back` ends it."""
        if key not in self._waiting and self._fits(key, places):
            self._serve(key, places)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append((places, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(key, places)
            else:
                self._leave(key, places, turn)
            raise

    def give_back(self, key: str, places: int = 1) -> None:
        """End a turn, and give its places to those who wait for them."""
        self._count -= places
        self._held[key] -= places
        if not self._held[key]:
            del self._held[key]
            if key not in self._waiting:
                self._served.pop(key, None)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while waiting := [key for key, queue in self._waiting.items() if self._fits(key, queue[0][0])]:
            key = min(waiting, key=lambda key: self._served.get(key, 0))
            places, turn = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not turn.cancelled():  # else its caller has left and has not run since
                self._serve(key, places)
                turn.set_result(None)

    def waiting(self, key: str) -> int:
        """Turns for which a key waits."""
        return len(self._waiting.get(key, ()))

    def _fits(self, key: str, places: int) -> bool:
        held = self._held.get(key, 0)
        of_all = self._total is None or not self._count or self._count + places <= self._total
        return of_all and (not held or held + places <= self._of_key())

    def _serve(self, key: str, places: int) -> None:
        self._held[key] += places
        self._count += places
        self._number += 1
        self._served[key] = self._number

    def _leave(self, key: str, places: int, given: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key, deque())
        if (places, given) in waiting:
            waiting.remove((places, given))
        if not waiting:
            self._waiting.pop(key, None)
            if not self._held.get(key):
                self._served.pop(key, None)
        self._serve_waiting()  # those behind it may ask for less
