"""A process that converts large batches: ``python -m gradwire_server.doors.http.tinker.batch_process SETTINGS``.

A batch of 64 MiB takes seconds and gigabytes to convert, some of it whatever is wrong with it. Here neither is the
front's, which receives the bytes of the tensors.
"""

from __future__ import annotations

import struct
import sys
from collections import deque

import numpy as np
from google.protobuf.message import DecodeError
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.bounded import program
from gradwire_server.bounded.frames import ProcessSettings
from gradwire_server.bounded.pool import ProcessPool
from gradwire_server.config import ServerConfig
from gradwire_server.doors.http.tinker.datums import EncodedBatch, loss_batch
from gradwire_server.doors.wire_format import TooManyFieldsError, counted
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits

METHOD = "ForwardBackward"
MAX_FIELDS = 1 << 21
"""Fields of one request, those of its data included: a second of counting."""
IDLE_S = 600.0
"""Seconds without a batch after which a process ends. One that starts imports for half a second."""
SIZES = struct.Struct("<QQ")


class BatchSettings(ProcessSettings):
    """The settings of such a process."""

    limits: Limits


class BatchPool:
    """The processes, as the front sees them."""

    def __init__(self, config: ServerConfig) -> None:
        settings = BatchSettings(memory_bytes=int(config.tokenizer_memory_gib * (1 << 30)), limits=config.limits)
        self._pool = ProcessPool(__name__, (METHOD,), lambda: settings, long_idle_s=IDLE_S)

    async def encode(self, owner: str, model: pb.ModelInfo, body: bytes) -> EncodedBatch:
        """Convert the body of a request about a run of this base model.

        Args:
            owner: Name of the caller's key.

        Raises:
            ServiceError: As of :func:`.datums.loss_batch`; LIMIT_EXCEEDED, SHUTTING_DOWN.
        """
        described = model.SerializeToString()
        reply = await self._pool.ask(METHOD, owner, SIZES.pack(len(described), 0) + described, body)
        header_bytes, width_bytes = SIZES.unpack_from(reply)
        header_end = SIZES.size + header_bytes
        header = pb.OperationHeader.FromString(reply[SIZES.size : header_end])
        widths = np.frombuffer(reply, "<i4", width_bytes // 4, header_end).tolist() if width_bytes else None
        return EncodedBatch(header, [reply[header_end + width_bytes :]], widths)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()


def _answer(limits: Limits, raw: bytes) -> bytes:
    model_bytes, _ = SIZES.unpack_from(raw)
    model_end = SIZES.size + model_bytes
    model, body = pb.ModelInfo.FromString(raw[SIZES.size : model_end]), raw[model_end:]
    try:
        deque(counted(body, tinker_pb2.ForwardBackwardRequest.DESCRIPTOR, MAX_FIELDS), 0)
        asked = tinker_pb2.ForwardBackwardRequest.FromString(body)
    except TooManyFieldsError:
        message = f"the batch has more than {MAX_FIELDS:,} fields, those of its data included; send it in parts"
        raise ServiceError(pb.ERROR_CODE_INVALID_BATCH, message, field="data") from None
    except DecodeError:
        raise ServiceError(
            pb.ERROR_CODE_INVALID_BATCH, "the data are not what this route takes", field="data"
        ) from None
    batch = EncodedBatch.of(loss_batch(asked, model, limits))
    header, widths = batch.header.SerializeToString(), np.array(batch.widths or (), "<i4").tobytes()
    return b"".join((SIZES.pack(len(header), len(widths)), header, widths, *batch.payload))


if __name__ == "__main__":
    given = BatchSettings.model_validate_json(sys.argv[1])
    program.run((METHOD,), given, lambda: lambda _method, _owner, raw: _answer(given.limits, raw))
