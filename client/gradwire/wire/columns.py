"""Convert one batch field from the caller's form to the column sent on the wire: shapes, dtypes and lengths.

Values are nested lists, lists of arrays, or one array: numpy, torch, or anything that converts to a numpy array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import Column

from gradwire.descriptions import LossField
from gradwire.errors import InvalidBatchError, type_of

Array = npt.NDArray[Any]
RAGGED = frozenset({"samples", "tokens", "steps"})
INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)
KINDS = {"int": "iu", "float": "fiub", "bool": "biuf"}


@dataclass(frozen=True)
class Place:
    """The field being converted, for messages."""

    field: LossField

    def error(self, problem: str, rule: str, row: int | None = None) -> InvalidBatchError:
        where = self.field.name if row is None else f"{self.field.name}, row {row}"
        return InvalidBatchError(f"{where}: {problem}", field=self.field.name, row=row, rule=rule)


def to_column(field: LossField, value: Any) -> Column:
    """Build the column of a declared field.

    Raises:
        InvalidBatchError: The shape or dtype is not one that the field declares.
    """
    place, value = Place(field), _plain(value)
    rank = _rank(value)
    shape = next((dims for dims in map(_dimensions, field.shapes) if len(dims) == rank), None)
    if shape is None and _is_hollow(value):
        shape = next((dims for dims in map(_dimensions, field.shapes) if len(dims) > rank), None)
    if shape is None:
        raise place.error(
            f"must be {field.dtype} {shapes_of(field)}, got {_described(value, rank)}", f"shape {shapes_of(field)}"
        )
    ragged = sum(name in RAGGED for name in shape)
    if isinstance(value, np.ndarray):
        parts, levels = _cut_array(value, ragged)
        rows = [0]
    else:
        parts, levels, rows = _cut_nested(place, value, ragged)
    return Column(_joined(place, parts, rows, levels), levels)


def token_rows(field: str, rows: Any) -> Column:
    """Build a column of token ids from rows of ids; a single flat row counts as one row."""
    described = LossField(field, "int", ("[rows, tokens]",))
    # Many rows (rollouts): convert them in one call.
    if isinstance(rows, list) and rows and all(map(_is_id_row, rows)):
        levels = (np.array([len(row) for row in rows], np.uint32),)
        return Column(_joined(Place(described), [np.concatenate(rows)], [0], levels), levels)
    value = _plain(rows)
    if _rank(value) == 1 and len(value):
        value = [value]
    return to_column(described, value)


def _is_id_row(row: Any) -> bool:
    return type(row) is np.ndarray and row.ndim == 1 and row.dtype.kind in "iu"


def row_of(levels: tuple[Array, ...], entry: int) -> int:
    """Map each entry below these levels to its row of the batch."""
    for lengths in reversed(levels):
        entry = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), entry, side="right"))
    return entry


def _plain(value: Any) -> Any:
    """Convert tensors and array-likes to numpy arrays; object arrays and other sequences to lists."""
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
    """Count the dimensions of an array or of nested sequences, down to the first non-empty element."""
    value = _plain(value)
    if isinstance(value, np.ndarray):
        return value.ndim
    if not isinstance(value, list):
        return 0
    return 1 + (_rank(next((each for each in value if _length(each) != 0), value[0])) if value else 0)


def _length(value: Any) -> int | None:
    """Length of a sequence; None for a single value, including 0-dimensional arrays."""
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        return len(value)
    except TypeError:
        return None


def _cut_array(value: Array, ragged: int) -> tuple[list[Array], tuple[Array, ...]]:
    levels, units = [], value.shape[0]
    for width in value.shape[1 : 1 + ragged]:
        levels.append(np.full(units, width, np.uint32))
        units *= width
    return [value.reshape(units, *value.shape[1 + ragged :])], tuple(levels)


def _cut_nested(place: Place, value: list[Any], ragged: int) -> tuple[list[Array], tuple[Array, ...], list[int]]:
    """Split nested values into the innermost arrays, the lengths per level, and the row of each array."""
    if ragged == 0:
        return [_leaf(place, value, None)], (), [0]
    units, rows, levels = value, list(range(len(value))), []
    for depth in range(ragged):
        lengths = []
        for index, unit in enumerate(units):
            length = _length(unit)
            if length is None:
                raise place.error(
                    f"holds {type_of(unit)} where a sequence is expected",
                    f"shape {shapes_of(place.field)}",
                    rows[index],
                )
            lengths.append(length)
        levels.append(np.array(lengths, np.uint32))
        if depth < ragged - 1:
            rows = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
            units = [inner for unit in units for inner in _plain(unit)]
    return [_leaf(place, unit, row) for unit, row in zip(units, rows, strict=True)], tuple(levels), rows


def _leaf(place: Place, value: Any, row: int | None) -> Array:
    try:
        array = np.asarray(_plain(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise place.error(f"is not {shapes_of(place.field)}: {error}", f"shape {shapes_of(place.field)}", row) from None
    if array.ndim == 0:
        raise place.error("is a single value", f"shape {shapes_of(place.field)}", row)
    return array


def _joined(place: Place, parts: list[Array], rows: list[int], levels: tuple[Array, ...]) -> Array:
    """Join all parts in the dtype sent on the wire: int32 where it fits (else int64), float32, bool."""
    dtype = place.field.dtype
    filled = [(part, row) for part, row in zip(parts, rows, strict=True) if part.size]
    wrong = [(part, row) for part, row in filled if part.dtype.kind not in KINDS[dtype]]
    if wrong:
        part, row = wrong[0]
        whole = (each for each in part.flat if isinstance(each, int)) if part.dtype == object else ()
        for number in whole:
            if not -(2**63) <= number < 2**63:
                raise place.error(f"{number} does not fit int64", "int64", row)
        got = "values that are not numbers" if part.dtype.kind in "OUSV" else f"{part.dtype.name} values"
        one_row = row if len(wrong) < len(filled) else None
        raise place.error(f"must be {dtype}, got {got}", f"dtype {dtype}", one_row)
    dense = {part.shape[1:] for part, _ in filled}
    if len(dense) > 1:
        raise place.error(f"rows have different dense shapes: {sorted(dense)}", f"shape {shapes_of(place.field)}")
    values = np.concatenate([part for part, _ in filled]) if filled else np.zeros(0, np.int64)
    if dtype == "float":
        # A value that is infinite in float32 is refused by the server, which names the row and the rule.
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    if dtype == "bool":
        odd = (values != 0) & (values != 1)
        if odd.any():
            entry = int(odd.reshape(len(odd), -1).any(axis=1).argmax())
            row = row_of(levels, entry)
            raise place.error(f"a mask holds 0 or 1, not {values[entry]}", "0 or 1", row)
        return values.astype(np.bool_)
    if not values.size:
        return values.astype(np.int32)
    low, high = int(values.min()), int(values.max())
    if high > INT64.max:
        raise place.error(f"{high} does not fit int64", "int64")
    fits = INT32.min <= low and high <= INT32.max
    return values.astype(np.int32 if fits else np.int64)


def _is_hollow(value: Any) -> bool:
    value = _plain(value)
    return value.size == 0 if isinstance(value, np.ndarray) else isinstance(value, list) and all(map(_is_hollow, value))


def _described(value: Any, rank: int) -> str:
    if rank == 0:
        return "a single value"
    if rank == 1 and any(isinstance(each, str) for each in value):
        return "text; get token ids from a tokenizer or from `await service.encode(model, texts)`"
    return f"{rank} dimensions" if rank > 1 else "1 dimension; a batch of one row is a list that holds one row"


def _dimensions(shape: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in shape.strip("[] ").split(","))


def shapes_of(field: LossField) -> str:
    """Describe the accepted shapes, for messages."""
    return " or ".join(field.shapes)
