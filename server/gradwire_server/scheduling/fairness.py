"""Fair order of requests to the engine: API keys in turn, and within a key its runs and samples in turn.

Requests that already wait in the engine's pipe keep it busy and let it execute small operations together, but a new
request waits for all of them. So the requests in the pipe are bounded by their tokens. While several keys use the
server, each has at most one request in the pipe: a key waits for at most one operation of each other key before its
own, however much the others submit.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gradwire_server.access.turns import ActiveKeys

T = TypeVar("T")

AHEAD = 2
"""Requests that may be in the engine whatever their size: one is read while the other is computed."""
SMALL_AHEAD = 32
"""Requests that may be in the engine while they hold fewer than ``PIPE_TOKENS`` tokens in total."""
PIPE_TOKENS = 4096
"""Tokens in the engine from which on only ``AHEAD`` requests are allowed."""


class FairQueue(Generic[T]):
    """Items that wait for the engine, by owner, and counters of the requests in it.

    Args:
        wants_alone: Whether an item must be alone in the engine; asked each time the item could go.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self, wants_alone: Callable[[T], bool] = lambda item: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wants_alone, self._active = wants_alone, ActiveKeys(clock)
        self._waiting: dict[str, deque[T]] = {}
        self._items: set[T] = set()
        self._there: Counter[str] = Counter()
        self._count_there = self._tokens = 0
        self._alone = False
        self._served: dict[str, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    @property
    def shared(self) -> bool:
        """Whether several keys are active."""
        return self._active.several

    @property
    def load(self) -> int:
        """Number of items that wait, and of requests in the engine."""
        return len(self._items) + self._count_there

    def put(self, owner: str, item: T) -> None:
        """Add an item at the end of its owner's queue."""
        self._active.asked(owner)
        self._waiting.setdefault(owner, deque()).append(item)
        self._items.add(item)

    def pop(self) -> T | None:
        """Remove and return the next item; None if nothing waits or the engine has no room.

        The item belongs to the least recently served owner; while keys share the server, owners with a request in the
        engine are passed over.
        """
        there = self._count_there
        if self._alone or there >= SMALL_AHEAD or (there >= AHEAD and self._tokens >= PIPE_TOKENS):
            return None
        shared = self.shared
        owners = [owner for owner in self._waiting if not (shared and self._there[owner])]
        if not owners:
            return None
        owner = min(owners, key=lambda owner: self._served.get(owner, 0))
        item = self._waiting[owner][0]
        alone = self._wants_alone(item)
        if alone and there:
            return None
        self._count += 1
        self._served[owner] = self._count
        self._items.remove(self._waiting[owner].popleft())
        if not self._waiting[owner]:
            del self._waiting[owner]
        return item

    def enter(self, owner: str, tokens: int, alone: bool = False) -> None:
        """Count a request that is sent to the engine."""
        self._there[owner] += 1
        self._count_there += 1
        self._tokens += tokens
        self._alone = alone

    def leave(self, owner: str, tokens: int) -> None:
        """Uncount a request that the engine has answered."""
        self._there[owner] -= 1
        self._count_there -= 1
        self._tokens -= tokens
        self._alone = False

    def clear(self) -> list[T]:
        """Remove and return every waiting item."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        self._items.clear()
        return items
