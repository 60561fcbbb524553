"""A batch above the limit of a body becomes a promise that fails, so that its number is used up."""

from __future__ import annotations

from fastapi.responses import JSONResponse, Response
from google.protobuf.message import DecodeError
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.doors.http.protocol import DirectCall, OversizedRoute
from gradwire_server.doors.http.tinker.datums import loss_operation
from gradwire_server.doors.http.tinker.models import Models
from gradwire_server.doors.http.tinker.training_requests import MAX_NUMBER

MODEL_ID, MODEL_ID_CHARS = b"\n", 127
"""The tag of ``model_id``, and the most characters of one whose length is one byte."""


def oversized_batch(models: Models) -> OversizedRoute:
    """The answer to a ``forward_backward`` above the limit."""

    async def refuse(call: DirectCall, reason: pb.Error) -> Response | None:
        asked = _numbered(call.content)
        if asked is None:
            return None
        promise = await models.submit(
            call.caller, asked.model_id, asked.seq_id, "loss", loss_operation(asked), refusal=reason,
            traceparent=call.traceparent,
        )  # fmt: skip
        return JSONResponse({"request_id": promise, "model_id": asked.model_id})

    return refuse


def _numbered(beginning: bytes) -> tinker_pb2.ForwardBackwardRequest | None:
    """The request with its first fields only: ``model_id`` and ``seq_id``."""
    if not beginning.startswith(MODEL_ID) or len(beginning) < 2 or beginning[1] > MODEL_ID_CHARS:
        return None
    end = 2 + beginning[1] + 1  # behind the tag of seq_id
    while end < len(beginning) and beginning[end] & 0x80:
        end += 1
    try:
        asked = tinker_pb2.ForwardBackwardRequest.FromString(beginning[: end + 1])
    except DecodeError:
        return None
    return asked if 1 <= asked.seq_id < MAX_NUMBER else None
