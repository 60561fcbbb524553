"""Fair order of requests to the engine: API keys in turn, and within a key its runs and samples in turn.

Requests that already wait in the engine's pipe keep it busy and let it execute small operations together, but a new
request waits for all of them. So the requests in the pipe are bounded by their tokens, and while several keys use the
server, so are those of each key: a key waits for few small operations or one large one of each other key before its
own, however much the others submit.

Samples advance by a token at a time beside everything else, and the engine divides its room for them between keys. So
they are only counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from gradwire_server.access.turns import ActiveKeys
from gradwire_server.engine_link.crash_marks import SLOTS

T = TypeVar("T")

AHEAD = 2
"""Requests that may be in the engine whatever their size: one is read while the other is computed."""
SMALL_AHEAD = 32
"""Requests that may be in the engine while they hold fewer than ``PIPE_TOKENS`` tokens in total."""
PIPE_TOKENS = 4096
"""Tokens in the engine from which on only ``AHEAD`` requests are allowed."""
SHARED_TOKENS = 512
"""Tokens that one key may have in the engine while keys share the server, unless it is one request."""
LEAST_TOKENS = 128
"""Tokens that a request counts for at least: an optimizer step costs about as much as some."""
SAMPLES_AHEAD = 128
"""Requests for samples in the engine from which on only keys that have none there send one."""
KEY_SAMPLES_AHEAD = 64
"""Those of one key while keys share the server."""
MOST_SAMPLES = SLOTS - SMALL_AHEAD - AHEAD
"""Requests for samples that may be in the engine, which has a slot for each request."""


class Load(NamedTuple):
    """What a request is for the engine.

    Attributes:
        tokens: Tokens that it brings.
        samples: Whether it samples beside other requests.
        alone: Whether it must be alone in the engine.
    """

    tokens: int
    samples: bool = False
    alone: bool = False


UNKNOWN = Load(PIPE_TOKENS)
"""Load of a request whose size is not known."""


class FairQueue(Generic[T]):
    """Items that wait for the engine, by owner, and counters of the requests in it.

    Args:
        load_of: Returns what an item is for the engine; asked each time the item could go.
        clock: Monotonic time in seconds.
    """

    def __init__(self, load_of: Callable[[T], Load], clock: Callable[[], float] = time.monotonic) -> None:
        self._load_of, self._active = load_of, ActiveKeys(clock)
        self._waiting: dict[str, deque[T]] = {}
        self._items: set[T] = set()
        self._tokens: Counter[str] = Counter()  # of each owner's requests in the engine, samples aside
        self._samples: Counter[str] = Counter()
        self._count_there = self._tokens_there = 0
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
        return len(self._items) + self._count_there + self._samples.total()

    def put(self, owner: str, item: T) -> None:
        """Add an item at the end of its owner's queue."""
        self._active.asked(owner)
        self._waiting.setdefault(owner, deque()).append(item)
        self._items.add(item)

    def pop(self) -> T | None:
        """Remove and return the next item; None if nothing waits or the engine has no room.

        The item belongs to the least recently served owner among those that have room.
        """
        if self._alone or not self._waiting:
            return None
        shared = self.shared
        loads = {owner: self._load_of(waiting[0]) for owner, waiting in self._waiting.items()}
        owners = [owner for owner, load in loads.items() if self._has_room(owner, load, shared)]
        if not owners:
            return None
        owner = min(owners, key=lambda owner: self._served.get(owner, 0))
        if loads[owner].alone and (self._count_there or self._samples.total()):
            return None
        item = self._waiting[owner].popleft()
        self._count += 1
        self._served[owner] = self._count
        self._items.remove(item)
        if not self._waiting[owner]:
            del self._waiting[owner]
        return item

    def _has_room(self, owner: str, load: Load, shared: bool) -> bool:
        if load.samples:
            own, total = self._samples[owner], self._samples.total()
            if not own:
                return total < MOST_SAMPLES
            return total < SAMPLES_AHEAD and not (shared and own >= KEY_SAMPLES_AHEAD)
        there, own = self._count_there, self._tokens[owner]
        if there >= SMALL_AHEAD or (there >= AHEAD and self._tokens_there >= PIPE_TOKENS):
            return False
        return not (shared and own and own + max(load.tokens, LEAST_TOKENS) > SHARED_TOKENS)

    def enter(self, owner: str, load: Load) -> None:
        """Count a request that is sent to the engine."""
        self._add(owner, load, 1)
        self._alone = load.alone

    def leave(self, owner: str, load: Load) -> None:
        """Uncount a request that the engine has answered."""
        self._add(owner, load, -1)
        self._alone = False

    def _add(self, owner: str, load: Load, sign: int) -> None:
        if load.samples:
            self._samples[owner] += sign
            return
        self._count_there += sign
        self._tokens_there += sign * load.tokens
        self._tokens[owner] += sign * max(load.tokens, LEAST_TOKENS)

    def clear(self) -> list[T]:
        """Remove and return every waiting item."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        self._items.clear()
        return items
