"""The frames that the front and a helper process exchange over the process's standard input and output.

A request is a prefix, the name of the caller's key, and the request's bytes; an answer is a prefix and the answer's
bytes, or a serialized error.
"""

from __future__ import annotations

import struct

from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel, ConfigDict

from gradwire_server.errors import ServiceError

REQUEST = struct.Struct("<BHQ")
"""Index of the method, bytes of the owner's name, bytes of the request."""
REPLY = struct.Struct("<BQ")
"""One of the kinds below, bytes of the body."""
ANSWERED, REFUSED, FAULT = range(3)
"""The body is the response; an Error; the type and message of an exception for the log."""


class ProcessSettings(BaseModel):
    """The settings with which a process is started.

    Attributes:
        memory_bytes: Bytes of data that the process may hold.
        niceness: Added to that of the front.
        memory_setting: The flag by which the operator allows more, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: int
    niceness: int = 0
    memory_setting: str = "--tokenizer-memory-gib"

    def too_much_memory(self, request_bytes: int) -> ServiceError:
        """LIMIT_EXCEEDED for a request that a process cannot hold."""
        gib = self.memory_bytes / 2**30
        message = (
            f"converting these {request_bytes:,} bytes takes more than the {gib:g} GiB that a process may hold"
            f" ({self.memory_setting}); send less at a time"
        )
        rule = f"{self.memory_setting.removeprefix('--').replace('-', '_')} = {gib:g}"
        return ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, rule=rule)
