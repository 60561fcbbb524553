"""Who is next at the engine, and how much it is given at a time: the keys in turn, and within a key its runs and
samplings in turn.

What waits in the engine's pipe is there when the engine is free, and small operations are carried out together; but
whoever comes in then waits for all of it. So it is bounded by its tokens, and while keys share the server each has one
request there: however much one key asks for, another waits for one operation of it at most before its own.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 2
"""So many requests may be in the engine whatever their size: one is read while the other is computed."""
SMALL_AHEAD = 32
PIPE_TOKENS = 4096
"""More of them while those there are together smaller than this."""
SHARED_S = 60.0
"""For so long after a key asked, the server counts as shared with it."""


class FairQueue(Generic[T]):
    """What waits for the engine, by owner, and what is there.

    Args:
        wants_alone: whether nothing else may be in the engine together with this item, as of the moment.
        clock: in seconds.
    """

    def __init__(
        self, wants_alone: Callable[[T], bool] = lambda item: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wants_alone, self._clock = wants_alone, clock
        self._waiting: dict[str, deque[T]] = {}
        self._there: Counter[str] = Counter()
        self._count_there = self._tokens = 0
        self._alone = False
        self._served: dict[str, int] = {}
        self._count = 0
        self._asked: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, item: object) -> bool:
        return any(item in waiting for waiting in self._waiting.values())

    @property
    def shared(self) -> bool:
        """Whether several keys use the server."""
        if len(self._asked) > 1:
            since = self._clock() - SHARED_S
            self._asked = {owner: at for owner, at in self._asked.items() if at >= since}
        return len(self._asked) > 1

    def put(self, owner: str, item: T) -> None:
        self._asked[owner] = self._clock()
        self._waiting.setdefault(owner, deque()).append(item)

    def pop(self) -> T | None:
        """The next, of the owner whose last turn is the longest ago, and who has room; None when nobody has."""
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
        self._waiting[owner].popleft()
        if not self._waiting[owner]:
            del self._waiting[owner]
        return item

    def enter(self, owner: str, tokens: int, alone: bool = False) -> None:
        """A request goes to the engine."""
        self._there[owner] += 1
        self._count_there += 1
        self._tokens += tokens
        self._alone = alone

    def leave(self, owner: str, tokens: int) -> None:
        """It is answered."""
        self._there[owner] -= 1
        self._count_there -= 1
        self._tokens -= tokens
        self._alone = False

    def clear(self) -> list[T]:
        """Everything that waits; it has no turn any more."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        return items
