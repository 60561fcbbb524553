"""How a program runs a recipe: observed, on a server that several share, or only to estimate it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Observer:
    """Follows a training.

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


@dataclass(frozen=True)
class Launch:
    """How a recipe is run.

    Attributes:
        dry_run: Whether to estimate the training, in a run that is deleted, in place of training.
        observer: Follows the training, and may stop it.
        service: The connection to use; None: the recipe opens its own.
        server: State folder of the own server behind ``service``; None if it has none, or if ``service`` is None.
    """

    dry_run: bool = False
    observer: Observer | None = None
    service: Any = None
    server: Path | None = None


ALONE = Launch()
"""A recipe that trains with a connection of its own, unobserved."""
