"""Rows of the data set that a recipe's settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradwire.data import DataError, Dataset
from gradwire.recipes.settings import Settings, SettingsError

T = TypeVar("T")


def rows_of(load: Callable[..., Dataset[T]], settings: Settings) -> Dataset[T]:
    """Load the rows of a training.

    Args:
        load: One of :func:`gradwire.data.conversations`, ``preferences`` and ``prompts``.

    Raises:
        DataError: A row does not fit.
        SettingsError: The columns were not recognised; says how ``mapping`` names them.
    """
    try:
        return load(
            settings.data, mapping=settings.mapping, split=settings.split, limit=settings.limit or None,
            on_error=settings.on_error,
        )  # fmt: skip
    except DataError as error:
        if not error.unnamed:
            raise
        columns = ", ".join(f"{field}: COLUMN" for field in error.unnamed)
        raise SettingsError(f"{error.where}: name its columns in the settings, mapping: {{{columns}}}") from None
