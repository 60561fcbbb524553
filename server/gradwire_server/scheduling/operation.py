"""An operation without a result, and what is known of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import tokens_of
from gradwire_server.engine_client.process import EngineAnswer
from gradwire_server.journal.journal import uses
from gradwire_server.journal.segments import Buffer, Location
from gradwire_server.observability.tracing import NO_TRACE, Trace
from gradwire_server.operation_kinds import is_replayed, kind_of


def is_replayed_with(operation: pb.Operation, status: pb.Status.ValueType) -> bool:
    """Whether a recovery repeats an operation whose result has this status."""
    return status == pb.STATUS_SUCCEEDED and is_replayed(operation)


def may_begin_early(operation: pb.Operation) -> bool:
    """Whether the engine may begin the operation before it is in the journal.

    Nothing is left of such an operation once the engine has given up its run: it writes no files, and it needs none
    that somebody may delete before the journal has it.
    """
    return not kind_of(operation).writes_files and not uses(operation)


def drops_accumulation(operation: pb.Operation, status: pb.Status.ValueType) -> bool:
    """Whether an operation with a result of this status ends an accumulation that the engine may still hold."""
    return kind_of(operation).ends_accumulation and status != pb.STATUS_SUCCEEDED


@dataclass(eq=False)
class QueuedOperation:
    """An operation without a result.

    Attributes:
        refusal: what is wrong with it; its result once those before it have theirs.
        location: of its payload in the journal.
        appended: done once it is in the journal, or cannot be.
        early: whether the engine may have it before it is in the journal.
        retried: whether it may have been begun before.
        deaths: of engines that were carrying it out.
        answer: of the engine that it was handed to.
    """

    header: pb.OperationHeader
    content: bytes
    payload: Sequence[Buffer] | None
    accepted_at: float
    ack: asyncio.Future[pb.SubmitAck]
    refusal: pb.Error | None = None
    location: Location | None = None
    appended: asyncio.Future[Location | None] | None = None
    early: bool = False
    durable: bool = False
    cancelled: bool = False
    retried: bool = False
    deaths: int = 0
    answer: asyncio.Future[EngineAnswer] | None = None
    trace: Trace = NO_TRACE

    @cached_property
    def seq(self) -> int:
        return self.header.seq

    @cached_property
    def kind(self) -> str:
        return self.header.operation.WhichOneof("kind") or ""

    @cached_property
    def tokens(self) -> int:
        """What it takes of the engine at once: what a sample adds to its prompts comes a token at a time."""
        return tokens_of(self.header.operation, self.header.tensors, sampled=False)

    @property
    def apart(self) -> bool:
        """Whether no other of its run may be in the engine with it: it needs their results, or is suspected of having
        killed an engine."""
        return kind_of(self.header.operation).barrier or self.deaths > 0


class PayloadMemory:
    """The payloads of operations without a result that are held in memory: beyond a size they are read from the
    journal when they are needed.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0

    @property
    def full(self) -> bool:
        return self._held > self._limit

    def hold(self, operation: QueuedOperation) -> None:
        self._held += operation.header.payload_bytes

    def let_go(self, operation: QueuedOperation) -> None:
        if operation.payload is not None and operation.header.payload_bytes:
            self._held -= operation.header.payload_bytes
            operation.payload = None


def failed(seq: int, code: pb.ErrorCode.ValueType, message: str) -> pb.OperationResult:
    return pb.OperationResult(seq=seq, status=pb.STATUS_FAILED, error=pb.Error(code=code, message=message))


def cancelled(seq: int) -> pb.OperationResult:
    error = pb.Error(code=pb.ERROR_CODE_CANCELLED, message=f"operation {seq} was cancelled before it started")
    return pb.OperationResult(seq=seq, status=pb.STATUS_CANCELLED, error=error)


def retrieved(done: asyncio.Future[Any]) -> None:
    """Whoever waited may be gone: an error that nobody fetches is no fault."""
    if not done.cancelled():
        done.exception()
