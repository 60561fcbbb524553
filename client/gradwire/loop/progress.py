"""A progress line with live numbers on stderr, without dependencies."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from types import TracebackType

REFRESH_S = 0.1
BAR = 24


class Progress:
    """Progress bar: ``label ██████░░ 12/64 0:03 name 1.23``.

    Args:
        label: Name of the task.
        total: Total number of units.
        show: Whether to print; a terminal or notebook shows one updating line, other streams one line at the end.
    """

    def __init__(self, label: str, total: int, *, show: bool = True) -> None:
        self._label, self._total, self._show = label, total, show
        # A notebook's stream is not a terminal but handles a carriage return like one.
        self._live = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
        self._started = time.monotonic()
        self._printed = 0.0
        self._done = 0
        self._width = 0
        self._numbers: Mapping[str, float] = {}

    def update(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        """Set the progress; ``numbers`` replace the last ones."""
        self._done, self._numbers = done, numbers if numbers is not None else self._numbers
        now = time.monotonic()
        if self._show and self._live and (now - self._printed >= REFRESH_S or done >= self._total):
            self._printed = now
            self._draw()

    def say(self, text: str) -> None:
        """Print a separate line on stdout; on a terminal the bar continues below it."""
        if self._show and self._live:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
        print(text, flush=True)

    def _draw(self) -> None:
        line = self.line()[: shutil.get_terminal_size((120, 24)).columns - 1]
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

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
        if self._show and self._live:
            self._draw()
        if self._show:
            sys.stderr.write("\n" if self._live else self.line() + "\n")
