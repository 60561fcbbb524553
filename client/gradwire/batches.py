"""Convert a user's batch to the columns sent on the wire: check it against the declared fields and cut its padding.

A batch is columns (a mapping from field to values: see :mod:`gradwire.wire.columns`) or rows (a list of mappings). The
same content gives the same bytes in every form.

Padding is never sent. Where an ids field declares a padding mask and the batch has that mask, its zeros at either end
of a row are cut from the ids and from every aligned field that has the padded length in that row; a field that is
already shorter (for example one entry per scored token) is left as it is. The mask is then dropped. A mask that a loss
declares as a field of its own selects the scored tokens: only its zeros after the last 1 are cut, because nothing
depends on those tokens; the zeros before are context and stay. Without a padding mask, rows of equal length may still
be padded: the request marks them, and the server, which knows the model's padding token, cuts the padding at both ends.

The batch of any loss may have ``images``, a list for each row, which the server's model reads by its own processor
(:mod:`gradwire.wire.images`).

This module checks names, dtypes, shapes and masks. The server checks ranges and vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import IMAGES, Column

from gradwire.descriptions import LossField
from gradwire.errors import InvalidBatchError, did_you_mean, type_of
from gradwire.wire.columns import Place, row_of, shapes_of, to_column
from gradwire.wire.images import to_image_columns

Array = npt.NDArray[Any]

SCORING_FIELDS = (
    LossField("input_ids", "int", ("[rows, tokens]",), required=True, padding_mask="attention_mask"),
    LossField("loss_mask", "bool", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("target_tokens", "int", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("mask", "bool", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("candidates", "int", ("[rows, tokens, candidates]",), aligned_with="input_ids"),
)
"""The batch of an operation that scores tokens without a loss."""


def to_columns(owner: str, fields: Sequence[LossField], batch: Any) -> dict[str, Column]:
    """Convert a batch to columns without padding, in the order in which they are sent.

    Args:
        owner: The loss or operation that declares the fields; used in messages.
        fields: The declared fields.
        batch: Columns or rows (see the module docstring).

    Raises:
        InvalidBatchError: The batch breaks a rule; names the field, the row and the rule.
    """
    by_field = _by_name(batch)
    declared = {field.name: field for field in fields}
    images = by_field.pop(IMAGES, None) if IMAGES not in declared else None
    masks = {field.padding_mask: field for field in fields if field.padding_mask}
    mask_only = {
        name: LossField(name, "bool", ids.shapes, aligned_with=ids.name)
        for name, ids in masks.items()
        if name not in declared
    }
    known = declared | mask_only
    for name in by_field:
        if name not in known:
            raise InvalidBatchError(
                f"{owner} has no batch field {name!r}{did_you_mean(name, known)}; it takes {', '.join(known)}",
                field=name,
                rule="a declared field",
            )
    for field in fields:
        if field.required and field.name not in by_field:
            raise InvalidBatchError(
                f"{owner} needs the batch field {field.name!r}, {field.dtype} {shapes_of(field)}; "
                f"the batch has {', '.join(by_field) or 'no fields'}",
                field=field.name,
                rule="required",
            )
    columns = {name: to_column(known[name], value) for name, value in by_field.items()}
    _check_rows([field.name for field in fields if field.name in columns], columns)
    for mask, ids in masks.items():
        if mask in columns:
            _cut_padding(mask, ids, fields, columns)
    names = (name for name in columns if name not in mask_only)
    # Bytes last, so that the other values stay aligned in the payload.
    order = sorted(names, key=lambda name: (known[name].dtype == "bool", name))
    travelling = {name: columns[name] for name in order}
    if images is None:
        return travelling
    rows = next(column.num_rows for column in columns.values())
    return travelling | to_image_columns(images, rows)


def maybe_padded(fields: Sequence[LossField], batch: Any, columns: Mapping[str, Column]) -> list[str]:
    """List the ids fields that may be padded but have no mask; the server cuts them by the model's padding token.

    Rows of different lengths have no padding, unless a mask selects the scored tokens.
    """
    by_field = _by_name(batch)
    padded = []
    for field in fields:
        if (
            not field.padding_mask
            or field.name not in columns
            or (field.padding_mask in by_field and field.padding_mask not in columns)
        ):
            continue
        lengths = columns[field.name].levels[-1]
        if field.padding_mask in columns or (len(lengths) and (lengths == lengths[0]).all()):
            padded.append(field.name)
    return padded


def _by_name(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        raise InvalidBatchError(
            f"a batch is a mapping from field to values, or a list of such mappings, one per row; got a "
            f"{type(batch).__name__}",
            rule="columns or rows",
        )
    if not batch:
        raise InvalidBatchError("the batch is empty", rule="at least one row")
    for index, row in enumerate(batch):
        if not isinstance(row, Mapping):
            raise InvalidBatchError(
                f"row {index} of the batch is {type_of(row)}, not a mapping from field to value",
                row=index,
                rule="columns or rows",
            )
        for name in {*row} ^ {*batch[0]}:
            here, there = (0, index) if name in batch[0] else (index, 0)
            raise InvalidBatchError(
                f"row {here} of the batch has the field {name!r} but row {there} does not",
                field=str(name),
                row=index,
                rule="every row has the same fields",
            )
    return {str(name): [row[name] for row in batch] for name in batch[0]}


def _check_rows(order: list[str], columns: Mapping[str, Column]) -> None:
    if not order or not columns[order[0]].num_rows:
        raise InvalidBatchError("the batch is empty", field=order[0] if order else "", rule="at least one row")
    first = order[0]
    for name, column in columns.items():
        if column.num_rows != columns[first].num_rows:
            raise InvalidBatchError(
                f"{name} has {column.num_rows} rows but {first} has {columns[first].num_rows}",
                field=name,
                rule="equal row counts",
            )


def _cut_padding(mask_name: str, ids_field: LossField, fields: Sequence[LossField], columns: dict[str, Column]) -> None:
    mask, ids = columns[mask_name], columns.get(ids_field.name)
    place = Place(LossField(mask_name, "bool", ids_field.shapes))
    if ids is None:
        raise place.error(f"masks {ids_field.name}, which the batch does not have", f"with {ids_field.name}")
    travels = any(field.name == mask_name for field in fields)
    _check_same_lengths(place, mask, ids, ids_field.name)
    padded = mask.levels[-1]
    keep = np.zeros(len(mask.values), np.bool_)
    start = 0
    for sequence, width in enumerate(padded.tolist()):
        real = np.flatnonzero(mask.values[start : start + width])
        if len(real):
            keep[start + (0 if travels else real[0]) : start + real[-1] + 1] = True
            if not travels and real[-1] - real[0] + 1 != len(real):
                raise place.error(
                    "a padding mask may have zeros only at the ends of a row, and this one has some in between; "
                    "to leave tokens out of the loss use a loss mask",
                    "zeros only at the ends",
                    row_of(mask.levels[:-1], sequence),
                )
        start += width
    if keep.all():
        return
    for field in fields:
        if field.name in columns and (field.name == ids_field.name or field.aligned_with == ids_field.name):
            columns[field.name] = _cut(columns[field.name], padded, keep)


def _cut(column: Column, padded: Array, keep: Array) -> Column:
    """Cut the padding from the sequences that have the padded length."""
    if not column.levels or len(column.levels[-1]) != len(padded):
        return column
    lengths = column.levels[-1].astype(np.int64)
    if np.array_equal(lengths, padded):
        kept = keep
    else:
        ends, padded_ends = np.cumsum(lengths), np.cumsum(padded, dtype=np.int64)
        kept = np.ones(len(column.values), np.bool_)
        for end, length, padded_end, width in zip(ends, lengths, padded_ends, padded, strict=True):
            if length == width:
                kept[end - length : end] = keep[padded_end - width : padded_end]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    cut = np.bincount(sequence[kept], minlength=len(lengths)).astype(np.uint32)
    return Column(column.values[kept], (*column.levels[:-1], cut))


def _check_same_lengths(place: Place, mask: Column, ids: Column, ids_name: str) -> None:
    if len(mask.levels) != len(ids.levels):
        raise place.error(f"does not have the dimensions of {ids_name}", f"the shape of {ids_name}")
    for depth, (ours, theirs) in enumerate(zip(mask.levels, ids.levels, strict=True)):
        if len(ours) == len(theirs) and np.array_equal(ours, theirs):
            continue
        unit = int((ours != theirs).argmax()) if len(ours) == len(theirs) else 0
        row = row_of(mask.levels[:depth], unit)
        raise place.error(
            f"has {ours[unit]} entries but {ids_name} has {theirs[unit]}", f"the shape of {ids_name}", row
        )
