"""An operation whose payload is still coming in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import Usage
from gradwire_server.errors import ServiceError


@dataclass
class Incoming:
    """An operation and as much of its payload as has come; nothing is kept of one that will be refused anyway.

    Attributes:
        header: the operation.
        refusal: what is wrong with the operation; it becomes its result, and uses its number up.
        rejection: why it is not accepted; its number stays free.
        chunks: the payload so far.
        received: bytes of the payload that have come, kept or not.
    """

    header: pb.OperationHeader
    refusal: pb.Error | None = None
    rejection: ServiceError | None = None
    chunks: list[bytes] = field(default_factory=list)
    received: int = 0
    _usage: Usage | None = None

    def __post_init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def occupy(self, usage: Usage) -> None:
        """Counts the payload against its key while it comes in.

        Raises:
            ServiceError: LIMIT_EXCEEDED.
        """
        usage.receive(self.header.payload_bytes)
        self._usage = usage

    def add(self, chunk: bytes) -> None:
        """Takes the next bytes of the payload.

        Raises:
            ServiceError: INVALID_ARGUMENT for more bytes than were announced.
        """
        if not chunk:
            return
        self.received += len(chunk)
        if self.received > self.header.payload_bytes:
            raise ServiceError(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"the stream of frames is broken: operation {self.header.seq} sends more than the"
                f" {self.header.payload_bytes} bytes it announced",
            )
        self._digest.update(chunk)
        if self.refusal is None and self.rejection is None:
            self.chunks.append(chunk)

    def end(self) -> None:
        """Gives back the room that the payload had while it came in."""
        if self._usage is not None:
            self._usage.incoming_bytes -= self.header.payload_bytes
            self._usage = None

    @property
    def complete(self) -> bool:
        """Whether the whole payload has come."""
        return self.received == self.header.payload_bytes

    def check_digest(self) -> None:
        """
        Raises:
            ServiceError: PAYLOAD_CORRUPT when the payload is not the one that the header names.
        """
        digest = self._digest.digest() if self.received else b""
        if digest != self.header.payload_digest:
            raise ServiceError(
                pb.ERROR_CODE_PAYLOAD_CORRUPT,
                f"the payload of operation {self.header.seq} is not the one its digest names; submit it again",
            )
