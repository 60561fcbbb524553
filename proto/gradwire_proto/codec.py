"""Tensors on the wire: convert named columns of ragged rows to ``TensorSpec`` and little-endian bytes, and back.

``TensorSpec`` in ``training.proto`` defines the layout. Encoding copies only data that is not contiguous
and little-endian; decoding copies nothing: the columns are read-only views of the payload. :func:`check` reads
only descriptions, so that a payload of any size can be refused before it is received.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire_proto.v1 import training_pb2 as pb

Array = npt.NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_BOOL: np.dtype(np.bool_),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
    pb.DTYPE_UINT8: np.dtype(np.uint8),
}
_CODES: dict[str, pb.DType.ValueType] = {
    "bool": pb.DTYPE_BOOL,
    "int32": pb.DTYPE_INT32,
    "int64": pb.DTYPE_INT64,
    "float32": pb.DTYPE_FLOAT32,
    "float64": pb.DTYPE_FLOAT64,
    "uint8": pb.DTYPE_UINT8,
}
_NATIVE = {np.dtype(name): code for name, code in _CODES.items()}
"""The same by dtype, whose name takes numpy longer than all else here; one of another byte order is not among them."""
IMAGES, IMAGE_BYTES = "images", "image_bytes"
"""Columns of a batch with images: each row's images as numbers into the distinct ones, and the bytes of those."""
_LENGTH = np.dtype("<u4")
_MAX_LEVELS = 4
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 2**40
_MAX_NAME = 200


class CodecError(ValueError):
    """Columns, or a description of columns, break the layout.

    Attributes:
        field: The column's name; empty if the whole payload is at fault.
        rule: The rule in short form.
    """

    def __init__(self, message: str, *, field: str = "", rule: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.rule = rule


@dataclass(frozen=True)
class Column:
    """One named column: the values of all rows, one after the other, and the lengths that split them.

    Attributes:
        values: ``[total, *dense]``.
        levels: Lengths as uint32, outermost first; ``()`` for one value per row, one array for rows of values, two for
            rows of rows.
    """

    values: Array
    levels: tuple[Array, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.levels[0]) if self.levels else len(self.values)

    def rows(self) -> list[Array]:
        """Return each row's values as views; for a column with one level."""
        if len(self.levels) != 1:
            raise ValueError(f"rows() needs a column with one ragged level; this one has {len(self.levels)}")
        ends = np.cumsum(self.levels[0], dtype=np.int64)
        return np.split(self.values, ends[:-1]) if len(ends) else []

    @staticmethod
    def from_rows(rows: Sequence[Array]) -> Column:
        """Build a column with one level from each row's values."""
        if not rows:
            return Column(np.zeros(0, np.float32), (np.zeros(0, np.uint32),))
        return Column(np.concatenate(rows), (np.array([len(row) for row in rows], np.uint32),))


def encode(columns: Mapping[str, Column]) -> tuple[list[pb.TensorSpec], list[memoryview]]:
    """Return the descriptions, and the buffers whose concatenation is the payload. Buffers share the columns' memory.

    Raises:
        CodecError: The wire does not support the dtype, or lengths do not add up.
    """
    specs: list[pb.TensorSpec] = []
    buffers: list[memoryview] = []
    for name, column in columns.items():
        dtype = column.values.dtype
        code = _NATIVE.get(dtype) or _CODES.get(dtype.name)
        if code is None:
            raise CodecError(
                f"field {name!r} has dtype {column.values.dtype}; the wire carries {', '.join(_CODES)}",
                field=name,
                rule=f"dtype in {', '.join(_CODES)}",
            )
        spec = pb.TensorSpec(
            name=name, dtype=code, shape=column.values.shape, level_sizes=[len(level) for level in column.levels]
        )
        _check_spec(spec)
        _check_sums(spec, column.levels)
        specs.append(spec)
        parts = [np.ascontiguousarray(level, _LENGTH) for level in column.levels]
        parts.append(np.ascontiguousarray(column.values, _DTYPES[code]))
        buffers.extend(part.reshape(-1).view(np.uint8).data for part in parts if part.size)
    return specs, buffers


def spec_bytes(spec: pb.TensorSpec) -> int:
    """Size of a column in the payload, in bytes: its lengths and its values."""
    return sum(spec.level_sizes) * _LENGTH.itemsize + math.prod(spec.shape) * _DTYPES[spec.dtype].itemsize


def check(specs: Iterable[pb.TensorSpec], payload_bytes: int) -> None:
    """Refuse descriptions that contradict themselves or the size of the payload. Allocates nothing.

    Raises:
        CodecError: A rule is broken; names the field and the rule.
    """
    total, names = 0, set[str]()
    for spec in specs:
        _check_spec(spec)
        if spec.name in names:
            raise CodecError(f"field {spec.name!r} comes twice", field=spec.name, rule="each field once")
        names.add(spec.name)
        total += spec_bytes(spec)
    if total != payload_bytes:
        raise CodecError(
            f"the fields take {total} bytes, the payload has {payload_bytes}", rule="payload_bytes == sum of the fields"
        )


def decode(specs: Sequence[pb.TensorSpec], payload: bytes | bytearray | memoryview) -> dict[str, Column]:
    """Return the columns by name, as read-only views of the payload.

    Raises:
        CodecError: As for :func:`check`, and for lengths that do not add up or a bool that is neither 0 nor 1.
    """
    view = memoryview(payload).toreadonly()
    check(specs, view.nbytes)
    columns: dict[str, Column] = {}
    offset = 0
    for spec in specs:
        levels = []
        for size in spec.level_sizes:
            levels.append(np.frombuffer(view, _LENGTH, size, offset))
            offset += size * _LENGTH.itemsize
        _check_sums(spec, levels)
        dtype, count = _DTYPES[spec.dtype], math.prod(spec.shape)
        if dtype == np.bool_ and count and np.frombuffer(view, np.uint8, count, offset).max() > 1:
            raise CodecError(f"field {spec.name!r} is bool and has a byte above 1", field=spec.name, rule="0 or 1")
        columns[spec.name] = Column(np.frombuffer(view, dtype, count, offset).reshape(tuple(spec.shape)), tuple(levels))
        offset += count * dtype.itemsize
    return columns


def digest(buffers: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """BLAKE2b-128 of the concatenation; empty for an empty payload."""
    state, empty = hashlib.blake2b(digest_size=16), True
    for buffer in buffers:
        if len(buffer):
            state.update(buffer)
            empty = False
    return b"" if empty else state.digest()


def _check_spec(spec: pb.TensorSpec) -> None:
    name, shape, levels = spec.name, spec.shape, spec.level_sizes
    if not 0 < len(name) <= _MAX_NAME:
        raise CodecError(f"a field has a name of {len(name)} characters", field=name[:50], rule=f"1 to {_MAX_NAME}")
    if spec.dtype not in _DTYPES:
        raise CodecError(f"field {name!r} has dtype number {spec.dtype}", field=name, rule="a dtype of the wire")
    if not 1 <= len(shape) <= _MAX_DIMENSIONS:
        raise CodecError(
            f"field {name!r} has {len(shape)} dimensions", field=name, rule=f"1 to {_MAX_DIMENSIONS} dimensions"
        )
    if len(levels) > _MAX_LEVELS:
        raise CodecError(
            f"field {name!r} has {len(levels)} ragged levels", field=name, rule=f"at most {_MAX_LEVELS} ragged levels"
        )
    if any(size < 1 for size in shape[1:]):
        raise CodecError(f"field {name!r} has a dense dimension of 0", field=name, rule="dense dimensions >= 1")
    if any(size > _MAX_ELEMENTS for size in levels) or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise CodecError(
            f"field {name!r} is too large: {list(shape)}", field=name, rule=f"at most {_MAX_ELEMENTS} values"
        )


def _check_sums(spec: pb.TensorSpec, levels: Sequence[Array]) -> None:
    """Check that the lengths of each level add up to the number of entries of the next, and the last to the values."""
    below = [*spec.level_sizes[1:], spec.shape[0]]
    for depth, (lengths, size) in enumerate(zip(levels, below, strict=False)):
        total = int(lengths.sum(dtype=np.uint64))
        if total != size:
            raise CodecError(
                f"field {spec.name!r}: the lengths of level {depth} add up to {total}, but they cut {size} entries",
                field=spec.name,
                rule=f"sum of level {depth} == {size}",
            )
