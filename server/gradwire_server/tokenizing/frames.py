"""What the front and a tokenizing process send each other over the process's standard input and output.

A request is a prefix, the name of the caller's key, and a serialized request of ``training.proto``; an answer is a
prefix and the serialized response, or the serialized error.
"""

from __future__ import annotations

import struct

from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel, ConfigDict

from gradwire_server.config import Limits
from gradwire_server.errors import ServiceError

METHODS = ("Encode", "Decode", "Render", "GetTokenizerInfo")
"""The RPCs that are answered in these processes."""

REQUEST = struct.Struct("<BHQ")
"""Index of the method, bytes of the owner's name, bytes of the request."""
REPLY = struct.Struct("<BQ")
"""One of the kinds below, bytes of the body."""
ANSWERED, REFUSED, FAULT = range(3)
"""The body is the response; an Error; the type and message of an exception for the log."""


class ProcessSettings(BaseModel):
    """What a process is started with.

    Attributes:
        files: Path of each model's ``tokenizer.json``, by model name.
        models: Path of each model that a caller may name, by name.
        named_first: Those that were loaded at the start.
        memory_bytes: Bytes of data that the process may hold.
        niceness: Added to that of the front.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, str]
    models: dict[str, str]
    named_first: tuple[str, ...]
    limits: Limits
    memory_bytes: int
    niceness: int = 0


def too_much_memory(request_bytes: int, memory_bytes: int) -> ServiceError:
    """LIMIT_EXCEEDED for a request that a process cannot hold."""
    return ServiceError(
        pb.ERROR_CODE_LIMIT_EXCEEDED,
        f"converting these {request_bytes:,} bytes takes more than the {memory_bytes / 2**30:g} GiB that a tokenizing"
        " process may hold (--tokenizer-memory-gib); send fewer texts at a time, or shorter ones",
        rule=f"tokenizer_memory_gib = {memory_bytes / 2**30:g}",
    )
