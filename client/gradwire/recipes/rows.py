"""Rows of the data set that a recipe's settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gradwire.data import DataError, Dataset, mixed, split_together
from gradwire.recipes.settings import RowSettings, Settings, SettingsError

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
    order = {"order_by": settings.order_by} if isinstance(settings, RowSettings) else {}
    if isinstance(settings.data, str):
        rows = _loaded(load, {"path": settings.data} | order, settings)
        if settings.validation:
            return rows, _loaded(load, {"path": settings.validation}, settings)
        return rows.split(settings.held_out, settings.seed) if settings.held_out else (rows, Dataset[T]([]))
    parts = [_loaded(load, {**part, **order}, settings) for part in settings.parts]
    weights = [float(part.get("weight", 1.0)) for part in settings.parts]
    if settings.validation or not settings.held_out:
        held_out = _loaded(load, {"path": settings.validation}, settings) if settings.validation else Dataset[T]([])
        return mixed(list(zip(parts, weights)), settings.seed), held_out
    kept, held_out = split_together(parts, settings.held_out, settings.seed)
    return mixed(list(zip(kept, weights)), settings.seed), held_out


def _loaded(load: Callable[..., Dataset[T]], part: Mapping[str, Any], settings: Settings) -> Dataset[T]:
    try:
        return load(
            part["path"], mapping=part.get("mapping", settings.mapping), split=part.get("split", settings.split),
            limit=part.get("limit", settings.limit) or None, on_error=settings.on_error,
            order_by=part.get("order_by", ""),
        )  # fmt: skip
    except DataError as error:
        if not error.unnamed:
            raise
        columns = ", ".join(f"{field}: COLUMN" for field in error.unnamed)
        raise ColumnsError(f"{error.where}: name its columns in the settings, mapping: {{{columns}}}") from None
