"""Counts the time that a process of the engine spends on its work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """The time spent on requests, which other threads read while they are executed."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._since: float | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the body's time as time spent on requests."""
        since = self._since = time.perf_counter()
        try:
            yield
        finally:
            self._since = None
            self._done_s += time.perf_counter() - since

    def seconds(self) -> tuple[float, float]:
        """Seconds spent on all work, the present one included, and on the present one; 0 when idle."""
        since = self._since
        present = time.perf_counter() - since if since is not None else 0.0
        return self._done_s + present, present
