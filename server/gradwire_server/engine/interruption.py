"""Interruption between two micro-batches: the operation that the engine computes may end there, or give way.

One thread computes, so what is asked between micro-batches is a variable of this module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _go_on() -> None:
    pass


_check: Callable[[], None] = _go_on
_yield: Callable[[], float] | None = None
_aside = False
_given_s = 0.0


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


class giving_way:  # a context manager, as above
    """Let others compute between the micro-batches of the body.

    Args:
        others: Computes for others, and returns the seconds that it took. What it computes gives way to nobody.
    """

    def __init__(self, others: Callable[[], float]) -> None:
        self._others = others

    def __enter__(self) -> None:
        global _yield
        _yield = self._others

    def __exit__(self, *error: object) -> None:
        global _yield
        _yield = None


def give_way() -> None:
    """Let others compute, if the present operation gives way. Every process of the engine calls it equally often."""
    global _yield, _aside, _given_s
    others = _yield
    if others is None:
        return
    _yield, _aside = None, True
    try:
        with interruptible(_go_on), torch.enable_grad():  # as if between two operations
            _given_s += others()
    finally:
        _yield, _aside = others, False


def is_aside() -> bool:
    """Whether what is computed is computed between two micro-batches of an operation, whose memory is taken."""
    return _aside


def given_s() -> float:
    """Seconds that operations have given to others since the start."""
    return _given_s
