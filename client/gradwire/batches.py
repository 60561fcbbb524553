"""Any batch a user holds to the columns that travel: checked against the loss's declared fields, padding cut.

A batch is columns (a mapping from field to padded arrays, nested lists, lists of arrays; numpy, torch or anything
that gives a numpy array) or rows (a list of mappings). The same content gives the same bytes in every form.

Padding never travels. Where an ids field declares a padding mask and the batch has it, its zeros at either end of
a row are cut from the ids and from every field aligned with them that has the padded length in that row; a field
that is shorter already (one entry a scored token, say) is left as it is. A mask that is only that is then dropped.

What is checked here: names, dtypes, shapes, masks. Ranges and vocabulary are the server's to check.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import Column

from gradwire.errors import InvalidBatchError
from gradwire.results import LossField

Array = npt.NDArray[Any]
RAGGED = frozenset({"samples", "tokens", "steps"})
KINDS = {"int": "iu", "float": "fiub", "bool": "biuf"}

SCORING_FIELDS = (
    LossField("input_ids", "int", ("[rows, tokens]",), required=True, padding_mask="attention_mask"),
    LossField("loss_mask", "bool", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("target_tokens", "int", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("mask", "bool", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("candidates", "int", ("[rows, tokens, candidates]",), aligned_with="input_ids"),
)
"""The batch of an operation that scores tokens without a loss."""


def to_columns(owner: str, fields: Sequence[LossField], batch: Any) -> dict[str, Column]:
    """The columns of a batch, padding cut, in the order in which they travel.

    Args:
        owner: who declares the fields, for messages.
        fields: the declared fields.
        batch: columns or rows: see the module.

    Raises:
        InvalidBatchError: with the field, the row and the rule.
    """
    given = _by_name(batch)
    declared = {field.name: field for field in fields}
    masks = {field.padding_mask: field for field in fields if field.padding_mask}
    mask_only = {
        name: LossField(name, "bool", ids.shapes, aligned_with=ids.name)
        for name, ids in masks.items()
        if name not in declared
    }
    known = declared | mask_only
    for name in given:
        if name not in known:
            raise InvalidBatchError(
                f"{owner} has no batch field {name!r}{_did_you_mean(name, known)}; it takes {', '.join(known)}",
                field=name,
                rule="a declared field",
            )
    for field in fields:
        if field.required and field.name not in given:
            raise InvalidBatchError(
                f"{owner} needs the batch field {field.name!r}, {field.dtype} {_shapes(field)}; "
                f"the batch has {', '.join(given) or 'no fields'}",
                field=field.name,
                rule="required",
            )
    columns = {name: _to_column(known[name], value) for name, value in given.items()}
    _check_rows([field.name for field in fields if field.name in columns], columns)
    for mask, ids in masks.items():
        if mask in columns:
            _cut_padding(mask, ids, fields, columns)
    travelling = (name for name in columns if name not in mask_only)
    # Bytes last, so that the other values stay aligned in the payload.
    return {name: columns[name] for name in sorted(travelling, key=lambda name: (known[name].dtype == "bool", name))}


def token_rows(field: str, rows: Any) -> Column:
    """A column of token ids from rows of ids; a single flat row is one row."""
    described = LossField(field, "int", ("[rows, tokens]",))
    if isinstance(rows, list) and rows and all(map(_is_id_row, rows)):  # many rows, as rollouts send them: at once
        levels = (np.array([len(row) for row in rows], np.uint32),)
        return Column(_joined(_Place(described), [np.concatenate(rows)], [0], levels), levels)
    value = _plain(rows)
    if _rank(value) == 1 and len(value):
        value = [value]
    return _to_column(described, value)


def _is_id_row(row: Any) -> bool:
    return type(row) is np.ndarray and row.ndim == 1 and row.dtype.kind in "iu"


def _by_name(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        raise InvalidBatchError(
            f"a batch is a mapping from field to values, or a list of such mappings, one a row; this is a "
            f"{type(batch).__name__}",
            rule="columns or rows",
        )
    if not batch:
        raise InvalidBatchError("the batch is empty", rule="at least one row")
    for index, row in enumerate(batch):
        if not isinstance(row, Mapping):
            raise InvalidBatchError(
                f"row {index} of the batch is a {type(row).__name__}, not a mapping from field to value",
                row=index,
                rule="columns or rows",
            )
        for name in {*row} ^ {*batch[0]}:
            here, there = (0, index) if name in batch[0] else (index, 0)
            raise InvalidBatchError(
                f"row {here} of the batch has the field {name!r} and row {there} has not",
                field=str(name),
                row=index,
                rule="every row has the same fields",
            )
    return {str(name): [row[name] for row in batch] for name in batch[0]}


def _plain(value: Any) -> Any:
    """Tensors and array-likes as numpy arrays; arrays of objects and other sequences as lists."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu()
        try:
            return value.numpy()
        except TypeError:  # bfloat16 has no numpy dtype
            return value.float().numpy()
    if not isinstance(value, np.ndarray) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return list(value) if value.dtype == object and value.ndim else value
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _rank(value: Any) -> int:
    """Dimensions of an array or of nested sequences, as far as its first element that is not empty tells."""
    value = _plain(value)
    if isinstance(value, np.ndarray):
        return value.ndim
    if not isinstance(value, list):
        return 0
    return 1 + (_rank(next((each for each in value if _length(each) != 0), value[0])) if value else 0)


def _length(value: Any) -> int | None:
    """Of a sequence; None for a single value, 0-dimensional arrays included."""
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        return len(value)
    except TypeError:
        return None


@dataclass(frozen=True)
class _Place:
    """The column that is being made, for messages."""

    field: LossField

    def error(self, problem: str, rule: str, row: int | None = None) -> InvalidBatchError:
        where = self.field.name if row is None else f"{self.field.name}, row {row}"
        return InvalidBatchError(f"{where}: {problem}", field=self.field.name, row=row, rule=rule)


def _to_column(field: LossField, value: Any) -> Column:
    place, value = _Place(field), _plain(value)
    rank = _rank(value)
    shape = next((dims for dims in map(_dimensions, field.shapes) if len(dims) == rank), None)
    if shape is None and _is_hollow(value):
        shape = next((dims for dims in map(_dimensions, field.shapes) if len(dims) > rank), None)
    if shape is None:
        got = "a single value" if rank == 0 else f"{rank} dimension{'s' * (rank != 1)}"
        raise place.error(f"must be {field.dtype} {_shapes(field)}, got {got}", f"shape {_shapes(field)}")
    ragged = sum(name in RAGGED for name in shape)
    if isinstance(value, np.ndarray):
        parts, levels = _cut_array(value, ragged)
        rows = [0]
    else:
        parts, levels, rows = _cut_nested(place, value, ragged)
    return Column(_joined(place, parts, rows, levels), levels)


def _cut_array(value: Array, ragged: int) -> tuple[list[Array], tuple[Array, ...]]:
    levels, units = [], value.shape[0]
    for width in value.shape[1 : 1 + ragged]:
        levels.append(np.full(units, width, np.uint32))
        units *= width
    return [value.reshape(units, *value.shape[1 + ragged :])], tuple(levels)


def _cut_nested(place: _Place, value: list[Any], ragged: int) -> tuple[list[Array], tuple[Array, ...], list[int]]:
    """The innermost sequences as arrays, the lengths of each level, and the row that each array belongs to."""
    if ragged == 0:
        return [_leaf(place, value, None)], (), [0]
    units, rows, levels = value, list(range(len(value))), []
    for depth in range(ragged):
        lengths = []
        for index, unit in enumerate(units):
            length = _length(unit)
            if length is None:
                raise place.error(
                    f"holds a {type(unit).__name__} where a sequence belongs",
                    f"shape {_shapes(place.field)}",
                    rows[index],
                )
            lengths.append(length)
        levels.append(np.array(lengths, np.uint32))
        if depth < ragged - 1:
            rows = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
            units = [inner for unit in units for inner in _plain(unit)]
    return [_leaf(place, unit, row) for unit, row in zip(units, rows, strict=True)], tuple(levels), rows


def _leaf(place: _Place, value: Any, row: int | None) -> Array:
    try:
        array = np.asarray(_plain(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise place.error(f"is not {_shapes(place.field)}: {error}", f"shape {_shapes(place.field)}", row) from None
    if array.ndim == 0:
        raise place.error("is a single value", f"shape {_shapes(place.field)}", row)
    return array


def _joined(place: _Place, parts: list[Array], rows: list[int], levels: tuple[Array, ...]) -> Array:
    """The values of all parts in the dtype in which they travel: int32 where that is enough, float32, bool."""
    dtype = place.field.dtype
    filled = [(part, row) for part, row in zip(parts, rows, strict=True) if part.size]
    wrong = [(part, row) for part, row in filled if part.dtype.kind not in KINDS[dtype]]
    if wrong:
        part, row = wrong[0]
        got = "values that are not numbers" if part.dtype.kind in "OUSV" else f"{part.dtype.name} values"
        one_row = row if len(wrong) < len(filled) else None
        raise place.error(f"must be {dtype}, got {got}", f"dtype {dtype}", one_row)
    dense = {part.shape[1:] for part, _ in filled}
    if len(dense) > 1:
        raise place.error(f"rows have different dense shapes: {sorted(dense)}", f"shape {_shapes(place.field)}")
    values = np.concatenate([part for part, _ in filled]) if filled else np.zeros(0, np.int64)
    if dtype == "float":
        with np.errstate(over="ignore"):  # what is infinite in float32 is the server's to refuse, by row and rule
            return values.astype(np.float32)
    if dtype == "bool":
        odd = (values != 0) & (values != 1)
        if odd.any():
            entry = int(odd.reshape(len(odd), -1).any(axis=1).argmax())
            row = _row_of(levels, entry)
            raise place.error(f"a mask holds 0 or 1, not {values[entry]}", "0 or 1", row)
        return values.astype(np.bool_)
    if not values.size:
        return values.astype(np.int32)
    low, high = int(values.min()), int(values.max())
    if high > np.iinfo(np.int64).max:
        raise place.error(f"{high} does not fit int64", "int64")
    fits = np.iinfo(np.int32).min <= low and high <= np.iinfo(np.int32).max
    return values.astype(np.int32 if fits else np.int64)


def _check_rows(order: list[str], columns: Mapping[str, Column]) -> None:
    if not order or not columns[order[0]].num_rows:
        raise InvalidBatchError("the batch is empty", field=order[0] if order else "", rule="at least one row")
    first = order[0]
    for name, column in columns.items():
        if column.num_rows != columns[first].num_rows:
            raise InvalidBatchError(
                f"{name} has {column.num_rows} rows where {first} has {columns[first].num_rows}",
                field=name,
                rule="equal row counts",
            )


def _cut_padding(mask_name: str, ids_field: LossField, fields: Sequence[LossField], columns: dict[str, Column]) -> None:
    mask, ids = columns[mask_name], columns.get(ids_field.name)
    place = _Place(LossField(mask_name, "bool", ids_field.shapes))
    if ids is None:
        raise place.error(f"masks {ids_field.name}, which the batch has not", f"with {ids_field.name}")
    travels = any(field.name == mask_name for field in fields)
    _check_same_lengths(place, mask, ids, ids_field.name)
    padded = mask.levels[-1]
    keep = np.zeros(len(mask.values), np.bool_)
    start = 0
    for sequence, width in enumerate(padded.tolist()):
        real = np.flatnonzero(mask.values[start : start + width])
        if len(real):
            keep[start + real[0] : start + real[-1] + 1] = True
            if not travels and real[-1] - real[0] + 1 != len(real):
                raise place.error(
                    "a padding mask has its zeros at the ends of a row, this one has some between; "
                    "to leave tokens out of the loss use a loss mask",
                    "zeros only at the ends",
                    _row_of(mask.levels[:-1], sequence),
                )
        start += width
    if keep.all():
        return
    for field in fields:
        if field.name in columns and (field.name == ids_field.name or field.aligned_with == ids_field.name):
            columns[field.name] = _cut(columns[field.name], padded, keep)


def _cut(column: Column, padded: Array, keep: Array) -> Column:
    """The column without the padding, in those sequences that have the padded length."""
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


def _check_same_lengths(place: _Place, mask: Column, ids: Column, ids_name: str) -> None:
    if len(mask.levels) != len(ids.levels):
        raise place.error(f"has other dimensions than {ids_name}", f"the shape of {ids_name}")
    for depth, (ours, theirs) in enumerate(zip(mask.levels, ids.levels, strict=True)):
        if len(ours) == len(theirs) and np.array_equal(ours, theirs):
            continue
        unit = int((ours != theirs).argmax()) if len(ours) == len(theirs) else 0
        row = _row_of(mask.levels[:depth], unit)
        raise place.error(
            f"has {ours[unit]} entries where {ids_name} has {theirs[unit]}", f"the shape of {ids_name}", row
        )


def _row_of(levels: tuple[Array, ...], entry: int) -> int:
    """The row of the batch that an entry below these levels belongs to."""
    for lengths in reversed(levels):
        entry = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), entry, side="right"))
    return entry


def _is_hollow(value: Any) -> bool:
    value = _plain(value)
    return value.size == 0 if isinstance(value, np.ndarray) else isinstance(value, list) and all(map(_is_hollow, value))


def _dimensions(shape: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in shape.strip("[] ").split(","))


def _shapes(field: LossField) -> str:
    return " or ".join(field.shapes)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
