"""Who is next at the engine: the keys in turn, and within a key its runs and samplings in turn.

However much one key asks for, another waits for one operation of it at most before its own: the operation that is
being carried out cannot be interrupted, and none is sent ahead into the engine's pipe while keys share the server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

ALONE, SHARED = 2, 1
"""How many requests the engine has at a time. A second one waits in its pipe, so that reading it overlaps with
computing; but whoever comes in then waits for two."""
SHARED_S = 60.0
"""For so long after a key asked, the server counts as shared with it."""


class Turns(Generic[T]):
    """What waits for the engine, by owner.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[T]] = {}
        self._served: dict[str, int] = {}
        self._count = 0
        self._asked: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, item: object) -> bool:
        return any(item in waiting for waiting in self._waiting.values())

    @property
    def pipe(self) -> int:
        """How many requests the engine may have now."""
        since = self._clock() - SHARED_S
        if len(self._asked) > 1:
            self._asked = {owner: at for owner, at in self._asked.items() if at >= since}
        return SHARED if len(self._asked) > 1 else ALONE

    def put(self, owner: str, item: T) -> None:
        self._asked[owner] = self._clock()
        self._waiting.setdefault(owner, deque()).append(item)

    def pop(self) -> T:
        """The next: of the owner whose last turn is the longest ago."""
        owner = min(self._waiting, key=lambda owner: self._served.get(owner, 0))
        self._count += 1
        self._served[owner] = self._count
        item = self._waiting[owner].popleft()
        if not self._waiting[owner]:
            del self._waiting[owner]
        return item
