"""Load data sets of conversations, preferences, prompts, ratings and steps from any source."""

from __future__ import annotations

import itertools
import logging
import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradwire.data import sources
from gradwire.data.dataset import Dataset
from gradwire.data.layouts import KINDS, Fields, Mapped
from gradwire.data.rows import Conversation, OtherKind, Preference, Prompt, Rating, Steps, Unfit
from gradwire.data.sources import DataError, Row, Source, is_large, read
from gradwire.data.stored import Copied, Joined, Lines

OnError = Literal["raise", "skip"]
TRIED = 100
"""Rows that tell the kind of a source."""
TOLD = 3
"""Skipped rows that the warning describes."""
WEIGHED = 64
"""Every so-manieth row is weighed, to know when they are too many for memory."""
logger = logging.getLogger("gradwire.data")


def conversations(
    source: Source,
    *,
    mapping: Mapped | None = None,
    split: str = "train",
    limit: int | None = None,
    on_error: OnError = "raise",
    order_by: str = "",
    **options: Any,
) -> Dataset[Conversation]:
    """Load conversations: see :func:`gradwire.data.layouts.conversation` for the layouts that are recognised.

    Args:
        source: See :func:`gradwire.data.read`.
        split: See :func:`gradwire.data.read`.
        options: See :func:`gradwire.data.read`.
        mapping: Field (``messages``, or ``prompt``, ``completion``, ``system``, ``tools``, ``weight``, ``text``) ->
            column or function.
        limit: Maximum number of rows.
        on_error: ``"raise"`` stops at the first row that does not fit; ``"skip"`` counts them in ``skipped``.
        order_by: Column of numbers by which rows are sorted, the smallest first.

    Raises:
        DataError: A row does not fit; names file, line and reason.
    """
    return _load("conversations", source, mapping, split, limit, on_error, order_by, options)


def preferences(
    source: Source,
    *,
    mapping: Mapped | None = None,
    split: str = "train",
    limit: int | None = None,
    on_error: OnError = "raise",
    order_by: str = "",
    **options: Any,
) -> Dataset[Preference]:
    """Load preference pairs; fields are ``prompt``, ``chosen``, ``rejected``, ``system``; see :func:`conversations`."""
    return _load("preferences", source, mapping, split, limit, on_error, order_by, options)


def prompts(
    source: Source,
    *,
    mapping: Mapped | None = None,
    split: str = "train",
    limit: int | None = None,
    on_error: OnError = "raise",
    order_by: str = "",
    **options: Any,
) -> Dataset[Prompt]:
    """Load prompts with answers; fields are ``prompt``, ``answer`` and ``system``; see :func:`conversations`."""
    return _load("prompts", source, mapping, split, limit, on_error, order_by, options)


def ratings(
    source: Source,
    *,
    mapping: Mapped | None = None,
    split: str = "train",
    limit: int | None = None,
    on_error: OnError = "raise",
    order_by: str = "",
    **options: Any,
) -> Dataset[Rating]:
    """Load answers with a label; fields are ``prompt``, ``completion``, ``label``, ``messages``, ``system``; see
    :func:`conversations`."""
    return _load("ratings", source, mapping, split, limit, on_error, order_by, options)


def steps(
    source: Source,
    *,
    mapping: Mapped | None = None,
    split: str = "train",
    limit: int | None = None,
    on_error: OnError = "raise",
    order_by: str = "",
    **options: Any,
) -> Dataset[Steps]:
    """Load answers in labelled steps; fields are ``prompt``, ``completions``, ``labels``, ``system``; see
    :func:`conversations`."""
    return _load("steps", source, mapping, split, limit, on_error, order_by, options)


LOADERS: Mapping[str, Callable[..., Dataset[Any]]] = {
    "preferences": preferences, "steps": steps, "ratings": ratings, "conversations": conversations, "prompts": prompts,
}  # fmt: skip
"""Kind of rows -> what loads them."""


def kind_of(source: Source, *, split: str = "train", mapping: Mapped | None = None) -> str:
    """Return the first kind of :data:`LOADERS` that the columns of a source's first rows are; "conversations" if none.

    A row that fits a kind decides; where none does, one that has a kind's columns. Any row with a question fits
    "prompts", which is the kind of rows that have no other's columns.
    """
    try:
        rows = [row for _, row in itertools.islice(read(source, split=split), TRIED) if not isinstance(row, DataError)]
    except ValueError:
        return "conversations"
    kinds = [kind for kind, (_, fields) in KINDS.items() if set(mapping or ()) <= set(fields)]
    found = {kind: [_fault(kind, row, mapping or {}) for row in rows] for kind in kinds}
    for refused in (Unfit, OtherKind):
        for kind in kinds:
            if kind != "prompts" and not all(isinstance(fault, refused) for fault in found[kind]):
                return kind
    return "prompts" if None in found.get("prompts", ()) else "conversations"


def _fault(kind: str, row: Row, mapping: Mapped) -> Exception | None:
    try:
        KINDS[kind][0](Fields(row, mapping))
    except Unfit as unfit:
        return unfit
    return None


def _load(
    kind: str,
    source: Source,
    mapping: Mapped | None,
    split: str,
    limit: int | None,
    on_error: OnError,
    order_by: str,
    options: Mapping[str, Any],
) -> Dataset[Any]:
    of, fields = KINDS[kind]
    for name in mapping or ():
        if name not in fields:
            raise ValueError(f"mapping names the field {name!r}; the fields are {', '.join(fields)}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error is "raise" or "skip"; this is {on_error!r}')

    def row_of(row: Row | DataError, place: str) -> Any:
        if isinstance(row, DataError):
            raise row
        read = Fields(row, mapping or {})
        read.used.add(order_by)
        made = replace(of(read), place=place)
        said.note(place, read)
        return made

    said = _Said()
    keys = array("d")
    rows: list[Any] | Lines[Any] | Copied[Any] = []
    if isinstance(source, str | Path) and is_large(Path(source)):
        rows = Lines(Path(source), row_of)
    size, in_memory = 0, isinstance(source, Sequence) and not isinstance(source, str)
    skipped: list[DataError] = []
    for place, row in rows.read() if isinstance(rows, Lines) else read(source, split=split, **options):
        if limit is not None and len(rows) >= limit:
            break
        try:
            read_row = row_of(row, place)
            if order_by and not isinstance(row, DataError):
                keys.append(_key(row, order_by))
            rows.append(read_row)
            if isinstance(rows, list) and not in_memory and len(rows) % WEIGHED == 1:
                size += WEIGHED * len(pickle.dumps(read_row))
                rows = Copied(rows) if size > sources.LARGE_BYTES else rows
        except (DataError, Unfit) as error:
            problem = error if isinstance(error, DataError) else DataError(place, str(error), error.unnamed)
            if on_error == "raise":
                raise problem from None
            skipped.append(problem)
    said.tell(source)
    if skipped and len(rows):
        logger.warning(
            "%d of %d rows were skipped: %s%s", len(skipped), len(skipped) + len(rows),
            "; ".join(error.where for error in skipped[:TOLD]), "; ..." if len(skipped) > TOLD else "",
        )  # fmt: skip
    if not len(rows):
        name = str(source) if isinstance(source, str | Path) else "the source"
        reason = f"no row could be used; the first: {skipped[0].where}" if skipped else "there are no rows"
        raise DataError(name, reason, skipped=skipped)
    if order_by:
        return Dataset(Joined([rows], [np.argsort(keys, kind="stable")]), skipped)
    return Dataset(rows, skipped)


class _Said:
    """Remarks on a source's rows and unused columns, each kept once with its count and first place."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._places: dict[str, str] = {}

    def note(self, place: str, fields: Fields) -> None:
        for each in (*(f"{name!s:.60}, which is not used" for name in fields.unused), *fields.remarks):
            self._counts[each] += 1
            self._places.setdefault(each, place)

    def tell(self, source: Source) -> None:
        if self._counts:
            name = f"{source}: " if isinstance(source, str | Path) else ""
            each = (f"{said} ({count}, first at {self._places[said]})" for said, count in self._counts.items())
            logger.warning("%srows have %s", name, "; ".join(each))


def _key(row: Row, column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        found = repr(row[column])[:50] if column in row else "no such column"
        raise Unfit(f"order_by: rows have a number as {column!r}, and this one has {found}") from None
