"""Convert columns of a batch to the shapes that a loss declares; errors name the row and the rule.

A column is values and the lengths that split them: no lengths for one value per row, one array for a row of tokens
(or of samples), two for a row of samples of tokens. Dimensions named ``samples``, ``tokens`` and ``steps`` may be
ragged; any other is dense. A dense array is accepted for a ragged dimension, and equal lengths for a dense one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradwire_losses.batch import BatchError
from gradwire_losses.registry import FieldSpec, LossSpec

RAGGED_DIMENSIONS = frozenset({"samples", "tokens", "steps"})
LOG_PROB_TOLERANCE = 1e-3  # rounding may raise a log-probability above 0 by this much
_KINDS = {"int": "iu", "float": "fiub", "bool": "biuf"}
_CAST: Mapping[str, type[np.generic]] = {"int": np.int64, "float": np.float32, "bool": np.bool_}

Array = NDArray[Any]


class Column(Protocol):
    """The wire form: ``values [total, *dense]`` and ``levels``, the lengths that split them, outermost first."""

    @property
    def values(self) -> Array: ...

    @property
    def levels(self) -> tuple[Array, ...]: ...


@dataclass(frozen=True)
class Field:
    """A column that has one of the shapes its loss declares.

    Attributes:
        spec: The loss's declaration.
        dimensions: The column's shape, e.g. ``("rows", "tokens")``.
        values: ``[total, *dense]``, as received.
        levels: Lengths of each ragged dimension, int64, outermost first.
        num_rows: Rows of the batch.
    """

    spec: FieldSpec
    dimensions: tuple[str, ...]
    values: Array
    levels: tuple[Array, ...]
    num_rows: int

    @property
    def lengths(self) -> Array:
        """The innermost lengths."""
        return self.levels[-1]

    def row_of(self, unit: int, level: int | None = None) -> int:
        """Return the row of an entry; with ``level``, the row of the unit that this level splits."""
        for lengths in reversed(self.levels if level is None else self.levels[:level]):
            unit = _segment(lengths, unit)
        return unit

    def error(self, message: str, rule: str, *, row: int | None = None) -> BatchError:
        where = self.spec.name if row is None else f"{self.spec.name}, row {row}"
        return BatchError(f"{where}: {message}", field=self.spec.name, row=row, rule=rule)

    def place_of(self, entry: int) -> tuple[int, str]:
        """Return the row of an entry, and its position within the row, e.g. ``"sample 1, token 3"``."""
        unit, place = entry, []
        for name, lengths in zip(
            reversed(self.dimensions[1 : 1 + len(self.levels)]), reversed(self.levels), strict=True
        ):
            outer = _segment(lengths, unit)
            place.append(f"{name.removesuffix('s')} {unit - int(lengths[:outer].sum())}")
            unit = outer
        return unit, ", ".join(reversed(place))

    def entry_error(self, entry: int, problem: str, rule: str) -> BatchError:
        """Build the error of one entry, located by row, sample and token; ``problem`` follows its value."""
        row, place = self.place_of(entry)
        value = self.values[entry]
        shown = f"is {value}" if value.ndim == 0 else f"holds {value.tolist()}"
        return self.error(f"{place} {shown}; {problem}".strip(), rule, row=row)


def _segment(lengths: Array, entry: int) -> int:
    return int(np.searchsorted(np.cumsum(lengths), entry, side="right"))


def read_fields(loss: LossSpec, columns: Mapping[str, Column]) -> dict[str, Field]:
    """Convert the columns to the fields that the loss declares.

    Raises:
        BatchError: A field is unknown, missing, of another dtype or shape, or of another number of rows.
    """
    specs = {spec.name: spec for spec in loss.fields}
    accepted = f"{loss.name} takes {', '.join(specs)}"
    for name in columns:
        if name in specs:
            continue
        if any(name == spec.padding_mask for spec in loss.fields):
            raise BatchError(
                f"{name} must not be sent: use it to cut the padding of each row, then leave it out (the SDK does "
                "both)",
                field=name,
                rule="rows without padding",
            )
        raise BatchError(f"{loss.name} has no batch field {name!r}; {accepted}", field=name, rule="a declared field")
    for spec in loss.fields:
        if spec.required and spec.name not in columns:
            shapes = " or ".join(spec.shapes)
            raise BatchError(
                f"{loss.name} needs the batch field {spec.name!r}, {spec.dtype} {shapes}: {spec.description} "
                f"The batch has {', '.join(columns) or 'no fields'}; {accepted}",
                field=spec.name,
                rule="required",
            )
    if all(_num_rows(column) == 0 for column in columns.values()):
        name = next(iter(columns), "")
        raise BatchError(f"the batch is empty: {name} has no rows", field=name, rule="at least one row")
    for name in columns:
        goes_with = specs[name].aligned_with
        if goes_with and goes_with not in columns:
            raise BatchError(
                f"{name} belongs to {goes_with}, which the batch does not have", field=name, rule=f"with {goes_with}"
            )
    fields = {name: _shaped(specs[name], column) for name, column in columns.items()}
    first = next(fields[spec.name] for spec in loss.fields if spec.name in fields)
    for other in fields.values():
        if other.num_rows != first.num_rows:
            raise other.error(
                f"has {other.num_rows} rows but {first.spec.name} has {first.num_rows}", "equal row counts"
            )
    return fields


def _num_rows(column: Column) -> int:
    return len(column.levels[0]) if column.levels else len(column.values)


def _shaped(spec: FieldSpec, column: Column) -> Field:
    values, levels = column.values, tuple(np.asarray(lengths).astype(np.int64) for lengths in column.levels)
    shapes = " or ".join(spec.shapes)
    if values.dtype.kind not in _KINDS[spec.dtype]:
        raise BatchError(
            f"{spec.name} must be {spec.dtype}, got {values.dtype}", field=spec.name, rule=f"dtype {spec.dtype}"
        )
    for outer, inner in zip(levels, [*(len(lengths) for lengths in levels[1:]), len(values)], strict=False):
        if outer.sum() != inner:
            raise BatchError(
                f"{spec.name}: its row lengths add up to {outer.sum()}, but there are {inner} entries",
                field=spec.name,
                rule="row lengths add up to the number of entries",
            )
    rank = len(levels) + values.ndim
    shape = next((shape for shape in spec.shapes if len(dimensions_of(shape)) == rank), None)
    if shape is None:
        raise BatchError(
            f"{spec.name} must be {shapes}, got an array of {rank} dimension{'s' * (rank != 1)}",
            field=spec.name,
            rule=f"shape {shapes}",
        )
    dimensions = dimensions_of(shape)
    ragged = sum(name in RAGGED_DIMENSIONS for name in dimensions)
    num_rows = _num_rows(column)
    while len(levels) < ragged:
        units, width = values.shape[:2]
        levels = (*levels, np.full(units, width, dtype=np.int64))
        values = values.reshape(units * width, *values.shape[2:])
    while len(levels) > ragged:
        *outer_levels, lengths = levels
        width = int(lengths[0]) if len(lengths) else 0
        field = Field(spec, dimensions, values, levels, num_rows)
        if (uneven := lengths != width).any():
            unit = int(uneven.argmax())
            raise field.error(
                f"{lengths[unit]} {dimensions[len(levels)]}, others have {width}",
                f"shape {shape}",
                row=field.row_of(unit, len(levels) - 1),
            )
        levels, values = tuple(outer_levels), values.reshape(len(lengths), width, *values.shape[1:])
    return Field(spec, dimensions, values, levels, num_rows)


def dimensions_of(shape: str) -> tuple[str, ...]:
    """``"[rows, tokens]" -> ("rows", "tokens")``."""
    return tuple(name.strip() for name in shape.strip("[] ").split(","))


def cast(field: Field, entries: Array | None = None) -> Array:
    """Convert values to int64, float32 or bool (a copy); only those of ``entries`` (a mask over them), if it is given.

    Raises:
        BatchError: A number is not finite in float32, a log-probability is above 0, or a mask entry is
            neither 0 nor 1.
    """
    values = field.values if entries is None else field.values[entries]
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(_CAST[field.spec.dtype])

    def refuse(wrong: Array, problem: str, rule: str) -> None:
        if wrong.any():
            position = int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())
            entry = position if entries is None else int(np.flatnonzero(entries)[position])
            raise field.entry_error(entry, problem, rule)

    if field.spec.dtype == "float":
        if values.dtype.kind == "f":
            refuse(~np.isfinite(result), "numbers must be finite (in float32)", "finite")
        if field.spec.holds_log_probs:
            problem = "a log-probability is at most 0: pass log p, not -log p or p"
            refuse(result > LOG_PROB_TOLERANCE, problem, "log-probability <= 0")
    elif field.spec.dtype == "bool" and values.dtype.kind != "b":
        refuse((values != 0) & (values != 1), "a mask holds 0 or 1", "0 or 1")
    return result
