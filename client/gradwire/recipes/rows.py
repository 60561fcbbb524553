"""Rows of the data set that a recipe's settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradwire.data import DataError, Dataset
from gradwire.recipes.settings import Settings, SettingsError

T = TypeVar("T")


class ColumnsError(SettingsError):
    """The columns of a data set were not recognised; the message says how ``mapping`` names them."""


def rows_of(load: Callable[..., Dataset[T]], settings: Settings) -> tuple[Dataset[T], Dataset[T]]:
    """Load the rows of a training, and those to evaluate on: of ``validation``, or else held out.

    Args:
        load: One of :func:`gradwire.data.conversations`, ``preferences`` and ``prompts``.

    Raises:
        DataError: A row does not fit.
        ColumnsError: The columns were not recognised.
    """
    rows = _loaded(load, settings.data, settings)
    if settings.validation:
        return rows, _loaded(load, settings.validation, settings)
    return rows.split(settings.held_out, settings.seed) if settings.held_out else (rows, Dataset[T]([]))


def _loaded(load: Callable[..., Dataset[T]], source: str, settings: Settings) -> Dataset[T]:
    try:
        return load(
            source, mapping=settings.mapping, split=settings.split, limit=settings.limit or None,
            on_error=settings.on_error,
        )  # fmt: skip
    except DataError as error:
        if not error.unnamed:
            raise
        columns = ", ".join(f"{field}: COLUMN" for field in error.unnamed)
        raise ColumnsError(f"{error.where}: name its columns in the settings, mapping: {{{columns}}}") from None
