"""Fair turns between API keys at something that serves few at a time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Turns at one resource. A free place goes to the waiting key that was served least recently.

    Args:
        of_key: Turns that one key may hold at a time; its further ones wait, in the order in which they were asked for.
        total: Turns that all keys together may hold; None: no limit.
    """

    def __init__(self, of_key: int, total: int | None = None) -> None:
        self._of_key, self._total = of_key, total
        self._held: Counter[str] = Counter()
        self._count = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
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

    async def take(self, key: str) -> None:
        """Wait for a turn; :meth:`give_back` ends it."""
        if key not in self._waiting and self._has_place(key):
            self._serve(key)
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.give_back(key)
            else:
                self._leave(key, given)
            raise

    def give_back(self, key: str) -> None:
        """End a turn, and give the place to who waits for it."""
        self._count -= 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            if key not in self._waiting:
                self._served.pop(key, None)
        while waiting := [key for key in self._waiting if self._has_place(key)]:
            key = min(waiting, key=lambda key: self._served.get(key, 0))
            given = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not given.cancelled():  # else its caller has left and has not run since
                self._serve(key)
                given.set_result(None)

    def waiting(self, key: str) -> int:
        """Turns for which a key waits."""
        return len(self._waiting.get(key, ()))

    def _has_place(self, key: str) -> bool:
        return self._held[key] < self._of_key and (self._total is None or self._count < self._total)

    def _serve(self, key: str) -> None:
        self._held[key] += 1
        self._count += 1
        self._number += 1
        self._served[key] = self._number

    def _leave(self, key: str, given: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key, deque())
        if given in waiting:
            waiting.remove(given)
        if not waiting:
            self._waiting.pop(key, None)
            if not self._held[key]:
                self._served.pop(key, None)
