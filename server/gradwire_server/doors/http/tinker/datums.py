"""Data of ``forward_backward`` as a batch of the core, and the losses that the protocol names.

Nothing is shifted on either side: entry t of a field belongs to the prediction made after the tokens up to t.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.doors.http.tinker.images import ChunkImages
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits

Array = npt.NDArray[Any]
DENSE_SHARE = 4
"""A batch may take this many times the largest body once sparse tensors are dense and rows are of one width."""
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro")
DTYPES: dict[int, np.dtype[Any]] = {
    tinker_pb2.TINKER_DTYPE_FLOAT32: np.dtype("<f4"),
    tinker_pb2.TINKER_DTYPE_INT64: np.dtype("<i8"),
    tinker_pb2.TINKER_DTYPE_INT32: np.dtype("<i4"),
}
INTEGERS = ("target_tokens",)
BOOLEANS = ("mask", "sequence_ratio_mask")


@dataclass(frozen=True)
class LossBatch:
    """A call of a loss with its batch.

    Attributes:
        widths: Targets at each position, by datum (0 for one without that dimension), if the data differ in it.
    """

    operation: pb.Operation
    columns: dict[str, Column]
    widths: list[int] | None = None


@dataclass(frozen=True)
class EncodedBatch:
    """A call of a loss as the core takes it.

    Attributes:
        header: Its operation, the description and the digest of its tensors.
        payload: Their bytes, in parts.
        widths: The widths of the :class:`LossBatch`.
    """

    header: pb.OperationHeader
    payload: list[bytes]
    widths: list[int] | None = None

    @classmethod
    def of(cls, batch: LossBatch) -> EncodedBatch:
        """Encode a batch."""
        specs, buffers = codec.encode(batch.columns)
        header = pb.OperationHeader(
            operation=batch.operation,
            tensors=specs,
            payload_bytes=sum(buffer.nbytes for buffer in buffers),
            payload_digest=codec.digest(buffers),
        )
        return cls(header, [bytes(buffer) for buffer in buffers], batch.widths)


def loss_operation(request: tinker_pb2.ForwardBackwardRequest) -> pb.Operation:
    """The operation of a request, for its loss and arguments."""
    kwargs: dict[str, float | str] = {}
    for name, value in request.config_values.items():
        kwargs[name] = value.text if value.WhichOneof("value") == "text" else value.number
    if not kwargs:
        kwargs = dict(request.loss_fn_config)
    call = pb.LossCall(loss_fn=request.loss_fn, loss_kwargs_json=json.dumps(kwargs, sort_keys=True) if kwargs else "")
    return pb.Operation(forward=call) if request.forward_only else pb.Operation(forward_backward=call)


def loss_batch(request: tinker_pb2.ForwardBackwardRequest, model: pb.ModelInfo, limits: Limits) -> LossBatch:
    """Convert a request about a run of this base model."""
    _check_loss(request.loss_fn)
    operation = loss_operation(request)
    if not request.data:
        raise _invalid("there are no data: send at least one", "data")
    images = ChunkImages(model, limits)
    rows = [_tokens(datum, row, images) for row, datum in enumerate(request.data)]
    names = sorted({name for datum in request.data for name in datum.loss_fn_inputs})
    fields: dict[str, list[Array]] = {}
    room = min(limits.max_payload_bytes, DENSE_SHARE * limits.max_http_body_bytes)
    for name in names:
        fields[name] = []
        for row, datum in enumerate(request.data):
            if name not in datum.loss_fn_inputs:
                message = f"datum {row} has no {name}, and others have: give it to all or to none"
                raise _invalid(message, name, row)
            fields[name].append(array := _array(datum.loss_fn_inputs[name], name, row, room))
            room -= array.nbytes
    widths = _widen(fields, room)
    columns = {"input_ids": Column.from_rows(rows), **images.columns()}
    columns |= {name: Column.from_rows([_typed(name, values) for values in arrays]) for name, arrays in fields.items()}
    call = operation.forward if request.forward_only else operation.forward_backward
    call.outputs.append("candidate_logprobs" if widths else "logprobs")
    return LossBatch(operation, columns, widths if widths and len(set(widths)) > 1 else None)


def _check_loss(name: str) -> None:
    if name in LOSSES:
        return
    known = ", ".join(LOSSES)
    if name == "stable_reinforce":
        message = (
            "the formula of stable_reinforce is not public: train with loss_fn=importance_sampling, or on samples of "
            f"older weights with ppo or cispo; there are {known}"
        )
    elif name == "custom":
        message = "losses stored on the server are not served; forward_backward_custom computes yours at the client"
    else:
        message = f"there is no loss {name[:100]!r} here; there are {known}"
    raise ServiceError(pb.ERROR_CODE_UNKNOWN_LOSS, message, field="loss_fn")


def _tokens(datum: tinker_pb2.Datum, row: int, images: ChunkImages) -> Array:
    parts: list[Array] = []
    images.begin_row()
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            parts.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), "model_input", row))
        elif kind == "image":
            image, where = chunk.image, f"datum {row}"
            if not image.expected_tokens:
                message = f"{where} has an image without expected_tokens, by which its targets and weights are aligned"
                raise _invalid(message, "model_input", row)
            parts.append(images.add(image.data, image.expected_tokens, where, "model_input", row))
        else:
            message = f"datum {row} has {kind or 'an unknown kind of'} input; this server trains text and images"
            raise _invalid(message, "model_input", row)
    if not sum(map(len, parts)):
        raise _invalid(f"datum {row} has no tokens", "model_input", row)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _array(tensor: tinker_pb2.InputTensor, name: str, row: int, room: int) -> Array:
    """``[T]`` or ``[T, K]``; sparse ones with zeros in place of absent entries."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise _invalid(f"{name} of datum {row} has dtype {tensor.dtype}; it is float32, int64 or int32", name, row)
    shape = list(tensor.shape)
    size = 1
    for length in shape:
        size *= max(length, 0)
    if any(length < 0 for length in shape) or len(shape) > 2:
        raise _invalid(f"{name} of datum {row} has shape {shape[:8]}; it is [T] or [T, K]", name, row)
    if size * dtype.itemsize > room:
        raise _invalid(f"{name} of datum {row} has shape {shape}: more than the server takes in one batch", name, row)
    if tensor.WhichOneof("encoding") != "sparse":
        values = _numbers(tensor.dense, dtype, name, row)
        if shape and values.size != size:
            raise _invalid(f"{name} of datum {row} has shape {shape} and {values.size} values", name, row)
        return values.reshape(shape) if shape else values
    if len(shape) != 2:
        raise _invalid(f"{name} of datum {row} is sparse and has shape {shape}; sparse tensors are [T, K]", name, row)
    values = _numbers(tensor.sparse.values, dtype, name, row)
    starts = _numbers(tensor.sparse.row_starts, np.dtype("<i8"), name, row)
    places = _numbers(tensor.sparse.columns, np.dtype("<i8"), name, row)
    counts = np.diff(starts)
    whole = len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(values) == len(places)
    if not whole or (counts < 0).any() or (len(places) and not 0 <= places.min() <= places.max() < shape[1]):
        raise _invalid(f"{name} of datum {row} is not a sparse tensor of shape {shape}", name, row)
    dense: Array = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), places] = values
    return dense


def _numbers(data: bytes, dtype: np.dtype[Any], name: str, row: int) -> Array:
    if len(data) % dtype.itemsize:
        raise _invalid(f"{name} of datum {row} has {len(data)} bytes, which are no {dtype.name}s", name, row)
    return np.frombuffer(data, dtype) if data else np.zeros(0, dtype)


def _widen(fields: dict[str, list[Array]], room: int) -> list[int] | None:
    """Give targets and weights the same number of candidates in every datum; returns the numbers they had.

    Candidates that are added have id 0 and weight 0, which adds nothing to the loss.

    Raises:
        ServiceError: INVALID_BATCH if they would take more than ``room`` bytes.
    """
    targets = fields.get("target_tokens")
    if targets is None or all(values.ndim == 1 for values in targets):
        return None
    widths = [values.shape[1] if values.ndim == 2 else 0 for values in targets]
    most = max(max(widths), 1)
    tokens = sum(len(values) for values in targets)
    if tokens * most * 16 > room + sum(values.nbytes for values in targets):
        message = f"{tokens} positions with up to {most} targets each are more than the server takes in one batch"
        raise _invalid(message, "target_tokens")
    for name in ("target_tokens", "weights"):
        if name in fields:
            fields[name] = [_wide(values, most) for values in fields[name]]
    return widths


def _wide(values: Array, most: int) -> Array:
    values = values[:, None] if values.ndim == 1 else values
    return values if values.shape[1] >= most else np.pad(values, ((0, 0), (0, most - values.shape[1])))


def _typed(name: str, values: Array) -> Array:
    if name in INTEGERS:
        return values if values.dtype.kind == "i" else values.astype(np.int64)
    if name in BOOLEANS:
        return values.astype(np.bool_)
    return values.astype(np.float32, copy=False)


def _invalid(message: str, field: str, row: int | None = None) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_BATCH, message, field=field, row=row)
