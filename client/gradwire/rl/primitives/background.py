"""The event loop of the synchronous interface, in its own thread; started at first use."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from gradwire.sync import LoopThread

T = TypeVar("T")

_lock = threading.Lock()
_loops: list[LoopThread] = []


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Block until the coroutine returns, and return its result. An interrupt cancels it."""
    with _lock:
        if not _loops:
            _loops.append(LoopThread())
    return _loops[0].run(work)
