"""An operation and its result: the record in a segment, the rows that follow from it, and what readers get of them.

:func:`rows_of` is the only way from a record to rows: the journal writes both in one commit, a start after a crash
makes the rows again (:mod:`.commit_log`), and so does a repair where the database is lost (:mod:`.repair`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal import history
from gradwire_server.journal.schema import OPERATION, row_digest
from gradwire_server.journal.segments import Buffer, Location
from gradwire_server.operation_kinds import has_loss, kind_of, loss_result, training_call

Row = tuple[str, Sequence[Any]]
"""SQL that enters or changes a row, and the values of its parameters."""
_DIGEST_BYTES = 16


# ---- what readers get ----


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
        outcome: The outcome that repeating it must give again (:func:`parse_outcome`); None if unknown.
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
        config: The run's settings, serialized, if the operation gave the run a head; else empty.
        num_trainable_parameters: With ``config``.
    """

    step: int
    failure_seq: int
    failure: str
    config: bytes = b""
    num_trainable_parameters: int = 0


def lost_result(seq: int) -> StoredResult:
    """PAYLOAD_CORRUPT in place of a result that cannot be read."""
    message = f"operation {seq} was carried out, but its result was damaged on the server's disk"
    error = pb.Error(code=pb.ERROR_CODE_PAYLOAD_CORRUPT, message=message)
    return StoredResult(pb.OperationResult(seq=seq, status=pb.STATUS_FAILED, error=error), b"")


# ---- the rows of a record ----


def rows_of(
    record: journal_pb2.JournalRecord, location: Location | None, payload_bytes: int, commit: int
) -> Iterator[Row]:
    """The changes that a record makes in the database, in order; the last one is of the run's row.

    They depend on the record alone, so they are the same whenever they are made.

    Args:
        record: An operation, or a result.
        location: Where the record is; None if it is not kept.
        commit: Number of the commit that it belongs to.
    """
    rows = _rows_of_result if record.HasField("result") else _rows_of_operation
    return rows(record, location, payload_bytes, commit)


def _rows_of_operation(
    record: journal_pb2.JournalRecord, location: Location | None, payload_bytes: int, commit: int
) -> Iterator[Row]:
    run_id, seq, header = record.run_id, record.seq, record.operation
    columns = (
        run_id, seq, identity(header), header.SerializeToString(deterministic=True), record.at, pb.STATUS_UNSPECIFIED,
        *_place(location, payload_bytes),
    )  # fmt: skip
    yield (
        "INSERT INTO operations (run_id, seq, identity, header, accepted_at, status, segment, offset, digest)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*columns, row_digest(*columns)),
    )
    for name in uses(header.operation):
        path = name if "/" in name else f"{run_id}/{name}"
        yield "INSERT OR IGNORE INTO uses VALUES (?, ?, ?)", (path, run_id, seq)
    yield (
        "UPDATE runs SET accepted_seq = ?, commits = ? WHERE run_id = ? AND accepted_seq = ?",
        (seq, commit, run_id, seq - 1),
    )


def _rows_of_result(
    record: journal_pb2.JournalRecord, location: Location | None, payload_bytes: int, commit: int
) -> Iterator[Row]:
    run_id, seq, result = record.run_id, record.seq, record.result
    header = result.SerializeToString(deterministic=True)
    place = _place(location, payload_bytes) if payload_bytes else (None, None)
    point = history.waiting(record.point) if record.HasField("point") else None
    yield (
        "INSERT OR IGNORE INTO results (run_id, seq, header, stored_at, segment, offset, digest, point)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (run_id, seq, header, record.stored_s, *place, row_digest(run_id, seq, header, *place), point),
    )
    outcome = outcome_of(result, record.outcome.payload_digest) if record.HasField("outcome") else None
    replay_s = result.timings.engine_s if record.kept == journal_pb2.KEPT_REPLAYED else 0.0
    changes: dict[str, object] = {"status": result.status, "outcome": outcome, "replay_s": replay_s}
    kept = "?, segment, offset"  # those that stay are not set: SQLite writes the index of every column that is
    if record.kept == journal_pb2.KEPT_NOT:
        changes |= {"segment": None, "offset": None}
        kept = "?, NULL, NULL"
    if location is not None and result.status != pb.STATUS_SUCCEEDED:
        changes["outcome_segment"] = location.segment
    yield (
        f"UPDATE operations SET {', '.join(f'{name} = ?' for name in changes)},"
        f" digest = {OPERATION.replace('status, segment, offset', kept)} WHERE run_id = ? AND seq = ?",
        (*changes.values(), result.status, run_id, seq),
    )
    if record.saved:
        checkpoint = result.checkpoint
        yield (
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)",
            (run_id, checkpoint.name, checkpoint.SerializeToString(deterministic=True)),
        )
    if record.config:
        yield (
            "UPDATE runs SET config = ?, num_trainable_parameters = ? WHERE run_id = ?",
            (record.config, record.num_trainable_parameters, run_id),
        )
    change, values = "", tuple[int | str, ...]()
    if result.status != pb.STATUS_CANCELLED:
        change, values = (
            "step = ?, failure_seq = ?, failure = ?, ",
            (record.step, record.failure_seq, record.failure),
        )
    yield (
        f"UPDATE runs SET {change}commits = ?, applied_seq = coalesce("
        "(SELECT min(seq) - 1 FROM operations WHERE run_id = runs.run_id AND seq > runs.applied_seq"
        " AND status = 0), accepted_seq)"
        " WHERE run_id = ?",
        (*values, commit, run_id),
    )


def _place(location: Location | None, payload_bytes: int) -> tuple[int | None, int | None]:
    """Segment and offset, as rows hold them."""
    if location is None:
        return None, None
    return location.segment, location.offset if payload_bytes else None


# ---- what rows hold ----


def identity(header: pb.OperationHeader) -> bytes:
    """Digest of an operation, its tensors and its payload; equal for repeated submissions of the same operation."""
    content = pb.OperationHeader(
        operation=header.operation,
        tensors=header.tensors,
        payload_bytes=header.payload_bytes,
        payload_digest=header.payload_digest,
    )
    return hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16).digest()


def uses(operation: pb.Operation) -> list[str]:
    """The checkpoints that a replay of an operation reads."""
    if kind_of(operation).loads_checkpoint:
        return [operation.load_checkpoint.checkpoint]
    call = training_call(operation)
    if call is not None and "/" in call.loss_kwargs_json:
        try:
            arguments = json.loads(call.loss_kwargs_json)
        except ValueError:
            return []
        values = arguments.values() if isinstance(arguments, dict) else ()
        return sorted({value for value in values if isinstance(value, str) and value.count("/") == 1})
    return []


def digest_of(payload: Sequence[Buffer]) -> bytes:
    """Digest of a payload, by which repeated operations are compared."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for buffer in payload:
        digest.update(buffer)
    return digest.digest()


def outcome(result: pb.OperationResult, payload_digest: bytes) -> journal_pb2.Outcome:
    """The part of a result that repeating its operation must give again."""
    kept = pb.OperationResult()
    kept.CopyFrom(result)
    for name in ("timings", "tensors", "payload_bytes", "epoch"):
        kept.ClearField(name)
    if has_loss(kept):
        loss_result(kept).ClearField("warnings")
    return journal_pb2.Outcome(result=kept, payload_digest=payload_digest)


def outcome_of(result: pb.OperationResult, payload_digest: bytes) -> bytes:
    """The bytes of an outcome, with a digest of them."""
    content = outcome(result, payload_digest).SerializeToString(deterministic=True)
    return digest_of([content]) + content


def parse_outcome(raw: bytes | None) -> journal_pb2.Outcome | None:
    """An outcome made by :func:`outcome_of`; None if there is none, or its bytes are not what was written."""
    if not raw or digest_of([raw[_DIGEST_BYTES:]]) != raw[:_DIGEST_BYTES]:
        return None
    return journal_pb2.Outcome.FromString(raw[_DIGEST_BYTES:])
