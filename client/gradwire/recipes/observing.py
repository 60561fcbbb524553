"""The observer through which a program follows a recipe that it runs, and stops it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar


class Observer:
    """Follows a training; set it with ``OBSERVER.set(...)`` before the recipe is run.

    Attributes:
        stop_wanted: Whether the training should save a checkpoint and raise
            :class:`~gradwire.loop.training_loop.TrainingStopped`.
    """

    stop_wanted = False

    def began(self, run_id: str, total: int) -> None:
        """The training has its run; it will have this many steps, those of earlier attempts included."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """A step has these metrics. Steps after the last checkpoint come again if the training was interrupted."""

    def saved(self, iteration: int, path: str) -> None:
        """A checkpoint of the state after this many steps is on the server; the same one may come again."""

    def close(self) -> None:
        """The training logs nothing more."""


OBSERVER: ContextVar[Observer | None] = ContextVar("gradwire_observer", default=None)
"""The observer of the recipes that this context runs."""
