"""Parts of one batch that come in several calls: all but the last with ``forward_backward(accumulate=True)``.

The parts are joined as columns, before anything is read from them, so the loss gets the batch that a single call would
have sent, and nothing of the computation knows of parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from gradwire_proto import codec
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import training_pb2
from numpy.typing import NDArray
from torch import Tensor

from gradwire_server.engine.errors import OperationError

Columns = Mapping[str, Column]

MAX_BYTES = 4 << 30
"""Maximum bytes of the parts that a run holds."""
_PREFIX = "part:"


class BatchParts:
    """The parts received so far, in order; false while there are none."""

    def __init__(self) -> None:
        self._call = training_pb2.LossCall()
        self._parts: list[Columns] = []
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def loss_fn(self) -> str:
        """The loss that the parts are for."""
        return self._call.loss_fn

    def check(self, call: training_pb2.LossCall, columns: Columns) -> None:
        """Check that a call may bring a further part, or the last one.

        Raises:
            OperationError: INVALID_ARGUMENT or INVALID_BATCH.
        """
        if not self._parts:
            return
        for field in ("loss_fn", "loss_kwargs"):
            mine, theirs = (_argument(each, field) for each in (self._call, call))
            if mine != theirs:
                raise OperationError(
                    training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                    f"{field} is {theirs!r}, and {len(self)} parts of a batch wait for their last one, whose {field} is"
                    f" {mine!r}: send that without accumulate, or drop the parts with zero_grad",
                    field=field,
                    rule="the same for all parts of a batch",
                )
        _check_alike(self._parts[0], columns, len(self) + 1)

    def add(self, call: training_pb2.LossCall, columns: Columns) -> None:
        """Hold a checked part.

        Raises:
            OperationError: LIMIT_EXCEEDED.
        """
        nbytes = self._nbytes + sum(_nbytes(column) for column in columns.values())
        if nbytes > MAX_BYTES:
            raise OperationError(
                training_pb2.ERROR_CODE_LIMIT_EXCEEDED,
                f"the parts of this batch take {nbytes:,} bytes, and a batch has {MAX_BYTES:,} at most: make it"
                " smaller, or several batches, each with a statistic of its own",
                rule=f"{MAX_BYTES:,} bytes in all parts",
            )
        self._call.CopyFrom(call)
        self._parts.append(columns)
        self._nbytes = nbytes

    def whole(self, columns: Columns) -> Columns:
        """The batch whose last part these columns are."""
        return joined([*self._parts, columns]) if self._parts else columns

    def row_lengths(self, name: str) -> Sequence[NDArray[np.uint32]]:
        """The innermost lengths of a column, for each part."""
        return [part[name].levels[-1] for part in self._parts if name in part and part[name].levels]

    def state_tensors(self) -> dict[str, Tensor]:
        """The parts as uint8 tensors: each part's call and columns as on the wire, and their payload."""
        state = {}
        for number, part in enumerate(self._parts):
            specs, buffers = codec.encode(part)
            call = training_pb2.Operation(forward_backward=self._call)
            header = training_pb2.OperationHeader(operation=call, tensors=specs).SerializeToString()
            for name, content in (("header", header), ("payload", b"".join(buffers))):
                state[f"{_PREFIX}{number}:{name}"] = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        return state

    @classmethod
    def of_state_tensors(cls, tensors: Mapping[str, Tensor]) -> BatchParts:
        """The parts of :meth:`state_tensors`; other entries are ignored."""
        parts = cls()
        while f"{_PREFIX}{len(parts)}:header" in tensors:
            raw, payload = (tensors[f"{_PREFIX}{len(parts)}:{name}"].numpy() for name in ("header", "payload"))
            header = training_pb2.OperationHeader.FromString(raw.tobytes())
            parts.add(header.operation.forward_backward, codec.decode(header.tensors, payload.tobytes()))
        return parts


def is_part(path: str) -> bool:
    """Whether a name is of :meth:`BatchParts.state_tensors`."""
    return path.startswith(_PREFIX)


def joined(parts: Sequence[Columns]) -> dict[str, Column]:
    """One batch of several with the same fields, row after row."""
    if any(IMAGES in part for part in parts):
        parts = _with_images(parts)
    columns_by_name = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        columns_by_name[name] = Column(
            np.concatenate([each.values for each in columns]),
            tuple(np.concatenate(levels) for levels in zip(*(each.levels for each in columns), strict=True)),
        )
    return columns_by_name


def _check_alike(first: Columns, part: Columns, number: int) -> None:
    odd = (part.keys() ^ first.keys()) - {IMAGES, IMAGE_BYTES}
    if odd:
        name = min(odd)
        has, lacks = ("the first part", f"part {number}") if name in first else (f"part {number}", "the first part")
        raise _refused(f"{has} of this batch has the field {name}, and {lacks} has not", name)
    for name in part.keys() & first.keys():
        mine, theirs = first[name], part[name]
        if (len(mine.levels), mine.values.shape[1:]) != (len(theirs.levels), theirs.values.shape[1:]):
            raise _refused(
                f"{name} is {_shape(theirs)} in part {number} of this batch and {_shape(mine)} in the first", name
            )


def _with_images(parts: Sequence[Columns]) -> list[Columns]:
    """Number the images over all parts, and give parts without images empty rows of them."""
    numbered: list[Columns] = []
    count = 0
    for part in parts:
        rows = max((column.num_rows for name, column in part.items() if name != IMAGE_BYTES), default=0)
        numbers = part.get(IMAGES, Column(np.zeros(0, np.int64), (np.zeros(rows, np.uint32),)))
        contents = part.get(IMAGE_BYTES, Column(np.zeros(0, np.uint8), (np.zeros(0, np.uint32),)))
        shifted = Column(numbers.values.astype(np.int64) + count, numbers.levels)
        numbered.append({**part, IMAGES: shifted, IMAGE_BYTES: contents})
        count += contents.num_rows
    return numbered


def _argument(call: training_pb2.LossCall, name: str) -> object:
    return call.loss_fn if name == "loss_fn" else json.loads(call.loss_kwargs_json or "{}")


def _nbytes(column: Column) -> int:
    return int(column.values.nbytes) + sum(int(level.nbytes) for level in column.levels)


def _shape(column: Column) -> str:
    names = ["rows", "tokens"] if len(column.levels) < 2 else ["rows", "samples", "tokens"]
    return f"[{', '.join([*names[: len(column.levels) + 1], *map(str, column.values.shape[1:])])}]"


def _refused(message: str, field: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_BATCH, message, field=field, rule="the same fields in all parts of a batch"
    )
