"""The event loop that the synchronous face runs on, in a thread of its own; started at the first need."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from gradwire.sync import LoopThread

T = TypeVar("T")

_lock = threading.Lock()
_loops: list[LoopThread] = []


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Interrupting the wait cancels it."""
    with _lock:
        if not _loops:
            _loops.append(LoopThread())
    return _loops[0].run(work)
