"""Interruption of the operation that the engine computes, between two of its micro-batches.

One thread computes, so what is asked between micro-batches is a variable of this module.
"""

from __future__ import annotations

from collections.abc import Callable


def _go_on() -> None:
    pass


_check: Callable[[], None] = _go_on


class interruptible:  # a context manager, which is cheaper as a class than as a generator
    """Ask ``check`` between the micro-batches of what the body computes; what it raises ends the computation."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._own = check

    def __enter__(self) -> None:
        global _check
        self._before, _check = _check, self._own

    def __exit__(self, *error: object) -> None:
        global _check
        _check = self._before


def between_micro_batches() -> None:
    """End the present operation here if it is to end.

    Raises:
        OperationError: The operation was cancelled, or its deadline has passed.
    """
    _check()
