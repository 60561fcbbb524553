"""Text of a terminal: numbers with units, amounts, and foreign text without control characters."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def size(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def precise(seconds: float) -> str:
    """Format a duration as :func:`duration` does, with tenths below a minute."""
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


def money(amount: float) -> str:
    """Format an amount with two decimals; a small one is not shown as nothing."""
    return "<0.01" if 0 < amount < 0.01 else f"{amount:,.2f}"


def plain(text: str) -> str:
    """Replace the characters of a foreign text that are not printable, such as terminal escapes, with "·"."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


@contextmanager
def warnings_to_stderr(command: str) -> Iterator[None]:
    """Print the SDK's warnings, such as skipped rows and an unreachable server, as ``command: warning``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{command}: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("gradwire").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
