"""An operation that waits for its result, and helpers that build results and classify operations."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import tokens_of
from gradwire_server.engine_client.client import EngineAnswer, Interruptible
from gradwire_server.journal.rows import uses
from gradwire_server.journal.segments import Buffer, Location
from gradwire_server.observability.tracing import NO_TRACE, Trace
from gradwire_server.operation_kinds import OperationKind, kind_of
from gradwire_server.scheduling.fairness import Load
from gradwire_server.scheduling.states import TRANSITIONS, IllegalTransitionError, OperationState


def is_replayed_with(operation: pb.Operation, status: pb.Status.ValueType) -> bool:
    """Whether a recovery replays an operation whose result has this status."""
    return status == pb.STATUS_SUCCEEDED and kind_of(operation).changes_state


def is_recorded_with(operation: pb.Operation, status: pb.Status.ValueType) -> bool:
    """Whether a run that keeps its journal keeps the batch and the outcome of an operation with this result's status.

    True for what gives the same bits whenever it is repeated: a sample does if no other rows share its batch.
    """
    kind = kind_of(operation)
    repeats = kind.changes_state or kind.divisible or operation.sample.deterministic
    return status == pb.STATUS_SUCCEEDED and repeats


def may_begin_early(operation: pb.Operation) -> bool:
    """Whether the engine may start the operation before it is in the journal.

    True if the operation leaves no trace once the engine drops its run: it writes no files, and it reads no checkpoint
    that a user could delete before the journal records its use.

    Awaited steps take 7.6 ms beside their computing, and would take 10.4 ms without this (``benchmarks/shortcuts.py``).
    """
    return not kind_of(operation).writes_files and not uses(operation)


def drops_accumulation(operation: pb.Operation, status: pb.Status.ValueType) -> bool:
    """Whether an operation with this status ended an accumulation that the engine may still hold."""
    return kind_of(operation).ends_accumulation and status != pb.STATUS_SUCCEEDED


@dataclass(eq=False)
class QueuedOperation:
    """An operation without a result.

    Attributes:
        header: The submitted operation without its payload.
        content: Identity of the operation, which tells a repeated submission from a reused number.
        payload: Payload in memory; None if it must be read from the journal.
        pixels: Of its images; 0 if it was accepted before the server started.
        accepted_at: Unix time in seconds.
        ack: Resolves with the acknowledgement once the operation is durable.
        refusal: Error found by the checks; becomes the result once the operations before it have theirs.
        location: Where its payload is in the journal.
        appended: Done when the append to the journal has succeeded or failed.
        may_be_early: Whether the engine may start it before it is in the journal.
        patient: Whether nobody waits for its acknowledgement.
        from_journal: Whether it was accepted before the server started.
        retried: Whether an earlier attempt may have started it.
        deaths: Number of engines that died while they executed it.
        answer: The pending answer of the engine to which it was sent.
        may_spread: Whether several engines may execute it.
        spread: What executes it on several engines; None if one does.
        full_since: Monotonic time at which it first found the disk full; None if it has not.
        batch: Its payload, to be recorded with its result; None if it is not recorded.
        not_before: Monotonic time before which it is not sent to the engine again.
        trace: Its spans.
        state: Where it is between submission and result; changed by its queue only.
        seq: Its number.
        row: The properties of its kind.
    """

    header: pb.OperationHeader
    content: bytes
    payload: Sequence[Buffer] | None
    accepted_at: float
    ack: asyncio.Future[pb.SubmitAck]
    refusal: pb.Error | None = None
    pixels: int = 0
    location: Location | None = None
    appended: asyncio.Future[Location | None] | None = None
    may_be_early: bool = False
    patient: bool = False
    from_journal: bool = False
    retried: bool = False
    deaths: int = 0
    answer: asyncio.Future[EngineAnswer] | None = None
    may_spread: bool = False
    spread: Interruptible | None = None
    full_since: float | None = None
    batch: Sequence[Buffer] | None = None
    not_before: float = 0.0
    trace: Trace = NO_TRACE
    state: OperationState = field(default=OperationState.NEW, init=False)
    seq: int = field(init=False)
    row: OperationKind = field(init=False)
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.seq, self.row = self.header.seq, kind_of(self.header.operation)
        # By the wall clock only what passed before this process had it: a clock that is set moves no deadline.
        self._begun = time.monotonic() - max(time.time() - self.accepted_at, 0.0)

    def enter(self, state: OperationState) -> None:
        """Move to another state; called by the operation's queue only.

        Raises:
            IllegalTransitionError: The state may not follow the present one.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"operation {self.seq} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @cached_property
    def kind(self) -> str:
        return self.header.operation.WhichOneof("kind") or ""

    @property
    def load(self) -> Load:
        """What it is for the engine; sampled tokens do not count, as they are made one at a time."""
        call = self.header.operation.sample
        samples = self.row.samples and not call.prompt_logprobs
        return Load(self._tokens, samples, alone=self.deaths > 0)

    @cached_property
    def _tokens(self) -> int:
        return tokens_of(self.header.operation, self.header.tensors, self.pixels, sampled=False)

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, and gets its result once it is journaled."""
        return self.state is OperationState.CANCELLING

    @property
    def deadline(self) -> float:
        """Monotonic time from which on it fails; infinite for never."""
        return self._begun + self.header.timeout_s if self.header.timeout_s > 0 else math.inf

    @property
    def apart(self) -> bool:
        """Whether no other operation of its run may be in the engine with it.

        True for a barrier, for an operation that is suspected of having killed an engine, and for one that several
        engines execute.
        """
        return self.row.barrier or self.deaths > 0 or self.may_spread


class PayloadMemory:
    """Count of the payload bytes that queued operations hold in memory.

    Beyond the limit, payloads are dropped once journaled and read from the journal when needed.

    Args:
        limit: Limit in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0

    @property
    def full(self) -> bool:
        """Whether the limit is exceeded."""
        return self._held > self._limit

    def hold(self, operation: QueuedOperation) -> None:
        """Count an operation's payload."""
        self._held += operation.header.payload_bytes

    def let_go(self, operation: QueuedOperation) -> None:
        """Drop an operation's payload from memory."""
        if operation.payload is not None and operation.header.payload_bytes:
            self._held -= operation.header.payload_bytes
            operation.payload = None


def failed(seq: int, code: pb.ErrorCode.ValueType, message: str) -> pb.OperationResult:
    """The result of a failed operation."""
    return pb.OperationResult(seq=seq, status=pb.STATUS_FAILED, error=pb.Error(code=code, message=message))


def cancelled(seq: int) -> pb.OperationResult:
    """The result of a cancelled operation."""
    error = pb.Error(code=pb.ERROR_CODE_CANCELLED, message=f"operation {seq} was cancelled before it started")
    return pb.OperationResult(seq=seq, status=pb.STATUS_CANCELLED, error=error)


def expired(seq: int) -> pb.Error:
    """The error of an operation whose deadline passed before the engine began it."""
    message = f"operation {seq} was not begun when its timeout was over; it was not carried out"
    return pb.Error(code=pb.ERROR_CODE_DEADLINE_EXCEEDED, message=message, field="timeout")


async def ended(future: asyncio.Future[Any]) -> None:
    """Wait until a future is done, whatever its outcome, and the callbacks that it has by now were called.

    That is ``asyncio.wait`` of one future, by a third of the calls.
    """
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    try:
        await waiter
    finally:
        future.remove_done_callback(wake)


def retrieved(done: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio logs no warning if its caller has left."""
    if not done.cancelled():
        done.exception()
