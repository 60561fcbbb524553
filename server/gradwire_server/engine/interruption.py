"""Interruption of the operation that the engine computes, between two of its micro-batches.

One thread computes, so what is asked between micro-batches is a variable of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _go_on() -> None:
    pass


_check: Callable[[], None] = _go_on


@contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Ask ``check`` between the micro-batches of what the body computes; what it raises ends the computation."""
    global _check
    before, _check = _check, check
    try:
        yield
    finally:
        _check = before


def between_micro_batches() -> None:
    """End the present operation here if it is to end.

    Raises:
        OperationError: The operation was cancelled, or its deadline has passed.
    """
    _check()
