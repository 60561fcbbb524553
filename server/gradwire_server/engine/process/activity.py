"""Counts the time that a process of the engine spends on its work."""

from __future__ import annotations

import time
from typing import Self


class Activity:
    """The time spent on requests, which other threads read while they are executed."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._since: float | None = None

    def working(self) -> Self:
        """Count the body's time as time spent on requests."""
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        since, self._since = self._since, None
        if since is not None:
            self._done_s += time.perf_counter() - since

    def seconds(self) -> tuple[float, float]:
        """Seconds spent on all work, the present one included, and on the present one; 0 when idle."""
        since = self._since
        present = time.perf_counter() - since if since is not None else 0.0
        return self._done_s + present, present
