"""A progress line with live numbers, on stderr, with no library."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from types import TracebackType

REFRESH_S = 0.1
BAR = 24


class Progress:
    """``label ██████░░ 12/64 0:03 name 1.23``; quiet unless shown.

    Args:
        label: what is going on.
        total: how much there is.
        show: whether to print at all; on a terminal one line that changes, else one line at the end.
    """

    def __init__(self, label: str, total: int, *, show: bool = True) -> None:
        self._label, self._total, self._show = label, total, show
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._printed = 0.0
        self._done = 0
        self._numbers: dict[str, float] = {}

    def update(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        self._done = done
        self._numbers.update(numbers or {})
        now = time.monotonic()
        if self._show and self._terminal and (now - self._printed >= REFRESH_S or done >= self._total):
            self._printed = now
            sys.stderr.write("\r" + self.line()[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
            sys.stderr.flush()

    def line(self) -> str:
        filled = BAR * min(self._done, self._total) // max(self._total, 1)
        seconds = int(time.monotonic() - self._started)
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in self._numbers.items())
        bar = "█" * filled + "░" * (BAR - filled)
        return f"{self._label} {bar} {self._done}/{self._total} {seconds // 60}:{seconds % 60:02d}  {numbers}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._show:
            sys.stderr.write("\r" + self.line() + "\x1b[K\n" if self._terminal else self.line() + "\n")
