"""Results of the core in the protocol's form: protobuf for losses and samples, JSON for all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.doors.http.tinker.prompt_scores import top_message

if TYPE_CHECKING:
    from gradwire_server.journal.rows import StoredResult

Array = npt.NDArray[Any]
HOW = ("sum", "mean", "min", "max", "slack", "unique")
SERVER_ERRORS = (
    pb.ERROR_CODE_INTERNAL,
    pb.ERROR_CODE_ENGINE_UNAVAILABLE,
    pb.ERROR_CODE_STORAGE_FULL,
    pb.ERROR_CODE_CHECKPOINT_CORRUPT,
    pb.ERROR_CODE_PAYLOAD_CORRUPT,
)
"""Errors that are the server's; all others are the caller's."""


def failed(error: pb.Error, message: str) -> dict[str, str]:
    """The body of a promise whose operation failed.

    Args:
        message: The error's, in the names of the protocol.
    """
    return {"error": message, "category": "server" if error.code in SERVER_ERRORS else "user"}


def loss_output(stored: StoredResult, widths: Sequence[int] | None) -> bytes:
    """The result of ``forward_backward`` or a forward.

    Args:
        widths: See :class:`.datums.LossBatch`.
    """
    columns = codec.decode(list(stored.header.tensors), stored.payload)
    logprobs = columns.get("logprobs") or columns["candidate_logprobs"]
    answer = tinker_pb2.ForwardBackwardOutput(output_type="ArrayRecord")
    answer.metrics.update(_metrics(stored.header.loss))
    if widths is None:
        answer.records.append(_record(logprobs.values, logprobs.levels[0]))
        return answer.SerializeToString(deterministic=True)
    for row, width in zip(logprobs.rows(), widths, strict=True):
        own = row[:, 0] if width == 0 else row[:, :width]
        answer.records.append(_record(np.ascontiguousarray(own), np.array([len(row)], np.uint32)))
    return answer.SerializeToString(deterministic=True)


def _record(values: Array, lengths: Array) -> tinker_pb2.ArrayRecord:
    """A record of consecutive data, one entry for each prediction."""
    values = np.ascontiguousarray(values, "<f4")
    entry = values.itemsize * math.prod(values.shape[1:])
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * entry
    record = tinker_pb2.ArrayRecord(type_tag="ArrayRecord", num_data=len(lengths))
    record.fields["logprobs"].CopyFrom(
        tinker_pb2.BatchedTensor(
            data=values.tobytes(),
            offsets=offsets.astype("<i8").tobytes(),
            dtype=tinker_pb2.TINKER_DTYPE_FLOAT32,
            trailing_shape=values.shape[1:],
        )
    )
    return record


def _metrics(loss: pb.LossResult) -> dict[str, float]:
    """Metrics as ``name:how``, where ``how`` says how the client combines those of several requests."""
    metrics: dict[str, float] = {}
    for name, value in loss.metrics.items():
        if name == "loss" or not math.isfinite(value):
            continue
        base, _, how = name.partition(":")
        if not how:
            base, _, how = name.rpartition("_")
            if how not in HOW or not base:
                base, how = name, "sum" if name.startswith("num_") else "mean"
        metrics[f"{base}:{how}"] = value
    metrics["num_tokens_processed:sum"] = float(loss.num_tokens)
    metrics["engine_loss_tokens:sum"] = float(loss.num_loss_tokens)
    return metrics


def step_output(result: pb.OptimStepResult) -> dict[str, Any]:
    """The result of ``optim_step``."""
    metrics = {"grad_norm:mean": result.grad_norm, "learning_rate:mean": result.learning_rate}
    metrics |= {"step:max": float(result.step)}
    return {"metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}}


def add_samples(answer: tinker_pb2.SampleResponse, stored: StoredResult) -> None:
    """Add the samples of one prompt to an answer."""
    columns: Mapping[str, Column] = codec.decode(list(stored.header.tensors), stored.payload)
    lengths = columns["token_ids"].levels[1]
    ends = np.cumsum(lengths)
    top_ids, top_logprobs = columns.get("top_token_ids"), columns.get("top_logprobs")
    for stop, end, length in zip(stored.header.sample.stop_reasons, ends, lengths, strict=True):
        part = slice(int(end - length), int(end))
        sequence = answer.sequences.add(
            end=tinker_pb2.SAMPLE_END_LENGTH if stop == "length" else tinker_pb2.SAMPLE_END_STOP,
            tokens=columns["token_ids"].values[part].astype("<i4").tobytes(),
            logprobs=columns["logprobs"].values[part].astype("<f4").tobytes(),
        )
        if top_ids is not None and top_logprobs is not None:
            sequence.top_logprobs.CopyFrom(top_message(top_ids.values[part], top_logprobs.values[part]))
