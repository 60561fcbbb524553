"""What the journal stores of an operation, as its readers see it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.segments import Buffer, Location


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A journaled operation without its payload.

    Attributes:
        header: The operation; if ``damaged``, only its run and number are set.
        identity: Digest that tells a repeated submission from a reused number; see :func:`identity`.
        accepted_at: Unix time in seconds.
        status: Status of its result; STATUS_UNSPECIFIED while it has none.
        deaths: Number of engines that died while they executed it.
        location: Where its payload is; None if it has none or it was dropped.
        damaged: Whether the row does not match its digest.
        outcome: What repeating it must give again (:func:`.same_state.outcome_of`); None if that is not known.
        replay_s: Seconds that the engine took for it; 0 if a recovery leaves it out, or if that is not known.
    """

    header: pb.OperationHeader
    identity: bytes
    accepted_at: float
    status: pb.Status.ValueType
    deaths: int
    location: Location | None
    damaged: bool = False
    outcome: bytes | None = None
    replay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result with its payload."""

    header: pb.OperationResult
    payload: Buffer


@dataclass(frozen=True, slots=True)
class RunMarks:
    """Values of the run's row after a result, written in the same transaction.

    Attributes:
        step: Number of optimizer steps.
        failure_seq, failure: As in the run's row.
        config: The run's settings, serialized, if the operation gave the run a head; else empty.
        num_trainable_parameters: With ``config``.
    """

    step: int
    failure_seq: int
    failure: str
    config: bytes = b""
    num_trainable_parameters: int = 0


def identity(header: pb.OperationHeader) -> bytes:
    """Digest of an operation, its tensors and its payload; equal for repeated submissions of the same operation."""
    content = pb.OperationHeader(
        operation=header.operation,
        tensors=header.tensors,
        payload_bytes=header.payload_bytes,
        payload_digest=header.payload_digest,
    )
    return hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16).digest()


def lost_result(seq: int) -> StoredResult:
    """PAYLOAD_CORRUPT in place of a result that cannot be read."""
    message = f"operation {seq} was carried out, but its result was damaged on the server's disk"
    error = pb.Error(code=pb.ERROR_CODE_PAYLOAD_CORRUPT, message=message)
    return StoredResult(pb.OperationResult(seq=seq, status=pb.STATUS_FAILED, error=error), b"")
