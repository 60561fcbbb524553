"""An operation whose payload is being received."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import Usage
from gradwire_server.errors import ServiceError


@dataclass
class Incoming:
    """An operation and the part of its payload received so far.

    The payload of an operation with a refusal or a rejection is counted, but not kept.

    Attributes:
        refusal: Error of the operation itself; it becomes the operation's result and uses up its number.
        rejection: Error because of which the operation is not accepted; its number stays free.
        chunks: The payload so far.
        received: Bytes of the payload received, kept or not.
        patient: Whether nobody waits for its acknowledgement, so that its commit may wait for others.
    """

    header: pb.OperationHeader
    refusal: pb.Error | None = None
    rejection: ServiceError | None = None
    chunks: list[bytes] = field(default_factory=list)
    received: int = 0
    patient: bool = False
    _usage: Usage | None = None

    def __post_init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def occupy(self, usage: Usage) -> None:
        """Count the payload against its key's quota while it is received.

        Raises:
            ServiceError: LIMIT_EXCEEDED.
        """
        usage.receive(self.header.payload_bytes)
        self._usage = usage

    def add(self, chunk: bytes) -> None:
        """Append the next bytes of the payload.

        Raises:
            ServiceError: INVALID_ARGUMENT for more bytes than the header announced.
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
        """Stop counting the payload as being received."""
        if self._usage is not None:
            self._usage.incoming_bytes -= self.header.payload_bytes
            self._usage = None

    @property
    def complete(self) -> bool:
        """Whether the whole payload has been received."""
        return self.received == self.header.payload_bytes

    def check_digest(self) -> None:
        """Check the payload against the digest in the header.

        Raises:
            ServiceError: PAYLOAD_CORRUPT if they do not match.
        """
        digest = self._digest.digest() if self.received else b""
        if digest != self.header.payload_digest:
            raise ServiceError(
                pb.ERROR_CODE_PAYLOAD_CORRUPT,
                f"the payload of operation {self.header.seq} is not the one its digest names; submit it again",
            )
