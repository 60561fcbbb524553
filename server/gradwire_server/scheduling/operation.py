"""An operation's life: its states, what moves it between them, and what its result does to its run.

What a failure aborts: the operations up to and including the next one that takes an optimizer step, except one whose
writer had already seen the failure; it and those after it run. An aborted step ends the failure; a step that fails by
itself starts a new one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import tokens_of
from gradwire_server.engine_client.client import EngineAnswer, Interruptible
from gradwire_server.journal.rows import RunMarks, uses
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer, Location
from gradwire_server.observability.tracing import NO_TRACE, Trace
from gradwire_server.operation_kinds import OperationKind, kind_of, loss_result, step_result


class Load(NamedTuple):
    """Load of the engine by a request.

    Attributes:
        samples: Whether it samples beside other requests.
        alone: Whether it must be alone in the engine.
    """

    tokens: int
    samples: bool = False
    alone: bool = False


class OperationState(Enum):
    """State of one submitted operation. Only its :class:`.run_queue.RunQueue` changes it.

    docs/architecture.md draws the states, and says what moves an operation from one to another.

    Attributes:
        NEW: Not accepted by a queue.
        WAITING: In memory and unacknowledged until the numbers before it have arrived.
        WRITING: Being written to the journal.
        EARLY: Being written to the journal, and sent to the engine or about to be.
        CANCELLING: Cancelled, and to be written to the journal before its result.
        QUEUED: In the journal, and waiting for its turn.
        SENT: In the journal, and sent to the engine or about to be.
        FINISHED: Has its result, which is being stored or is stored.
        DROPPED: Removed without a result; its number is free again, or its run is gone.
    """

    NEW = "new"
    WAITING = "waiting"
    WRITING = "writing"
    EARLY = "early"
    CANCELLING = "cancelling"
    QUEUED = "queued"
    SENT = "sent"
    FINISHED = "finished"
    DROPPED = "dropped"
    __hash__ = object.__hash__  # Enum's own is a function in Python


_S = OperationState
TRANSITIONS: Mapping[OperationState, frozenset[OperationState]] = {
    _S.NEW: frozenset({_S.WAITING, _S.QUEUED}),
    _S.WAITING: frozenset({_S.WRITING, _S.CANCELLING, _S.DROPPED}),
    _S.WRITING: frozenset({_S.QUEUED, _S.EARLY, _S.CANCELLING, _S.DROPPED}),
    _S.EARLY: frozenset({_S.SENT, _S.WRITING, _S.CANCELLING, _S.DROPPED}),
    _S.CANCELLING: frozenset({_S.FINISHED, _S.DROPPED}),
    _S.QUEUED: frozenset({_S.SENT, _S.FINISHED, _S.DROPPED}),
    _S.SENT: frozenset({_S.QUEUED, _S.FINISHED, _S.DROPPED}),
    _S.FINISHED: frozenset(),
    _S.DROPPED: frozenset(),
}
"""The states that may follow each state, as drawn in :class:`OperationState`."""

UNSENT = (_S.WRITING, _S.QUEUED)
"""The states of an operation that may be sent to the engine."""

JOURNALED = (_S.QUEUED, _S.SENT)
"""The states of an operation that is in the journal and may still be executed."""


DEATHS = 2
"""Number of engine crashes before an operation is quarantined."""


class IllegalTransitionError(RuntimeError):
    """A fault of the server: an operation was moved to a state that may not follow its present one."""


@dataclass(eq=False)
class Parked:
    """The parked state of a run.

    Attributes:
        since: Unix time in seconds.
        attempts: Number of failures in a row.
        trying: Whether the run is being tried again.
    """

    error: pb.Error
    since: float
    attempts: int = 1
    trying: bool = False


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

    Awaited steps take 7.6 ms beside their computing, and would take 10.4 ms without this.
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
        pixels: Pixels of its images; 0 if it was accepted before the server started.
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
        spread: Its samples in progress on several engines; None if one engine executes it.
        full_since: Monotonic time at which it first found the disk full; None if it has not.
        batch: Its payload, to be recorded with its result; None if it is not recorded.
        not_before: Monotonic time before which it is not sent to the engine again.
        state: Where it is between submission and result; changed by its queue only.
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
        """Load of the engine; sampled tokens do not count, as they are made one at a time."""
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


def operation_request(header: pb.OperationHeader, dropped_step: int) -> engine_pb2.EngineRequest:
    """The request to the engine that executes an operation.

    Args:
        dropped_step: Number of the newest earlier operation that ended an accumulation without succeeding; 0 for none.
    """
    operation = engine_pb2.EngineOperation(
        run_id=header.run_id,
        seq=header.seq,
        operation=header.operation,
        tensors=header.tensors,
        dropped_step=dropped_step,
    )
    return engine_pb2.EngineRequest(operation=operation)


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


def aborts(record: RunRecord, operation: QueuedOperation) -> bool:
    """Whether a failure that the operation's writer had not seen aborts it."""
    failure, header = record.failure_seq, operation.header
    return failure > header.failure_seen and failure not in header.expired_seen


def verdict_on(record: RunRecord, operation: QueuedOperation) -> pb.OperationResult | None:
    """The result of an operation that must not be executed, aborted or refused; None if it must be executed."""
    if aborts(record, operation):
        result = failed(
            operation.seq,
            pb.ERROR_CODE_ABORTED_PREDECESSOR,
            f"operation {operation.seq} ({operation.kind}) was not carried out, because operation"
            f" {record.failure_seq} before it failed: {record.failure}",
        )
        result.error.cause_seq = record.failure_seq
        return result
    if operation.refusal is not None:
        return pb.OperationResult(seq=operation.seq, status=pb.STATUS_FAILED, error=operation.refusal)
    return None


def _follow_failure(record: RunRecord, operation: QueuedOperation, result: pb.OperationResult) -> None:
    """Begin or end the run's failure with an operation's result; called by the run's queue only."""
    if result.status != pb.STATUS_CANCELLED and not aborts(record, operation):
        record.failure_seq, record.failure = 0, ""
    if result.status == pb.STATUS_FAILED:
        if result.error.code != pb.ERROR_CODE_ABORTED_PREDECESSOR:
            record.failure_seq, record.failure = operation.seq, result.error.message
        elif operation.row.steps:
            record.failure_seq, record.failure = 0, ""


def apply_result(record: RunRecord, operation: QueuedOperation, result: pb.OperationResult) -> RunMarks:
    """Apply a result to a run's record; return the values for its row. Called by the run's queue only."""
    loss = loss_result(result)
    _follow_failure(record, operation, result)
    if result.status == pb.STATUS_SUCCEEDED:
        if operation.row.steps:
            record.step = step_result(result).step
        elif operation.row.loads_checkpoint and result.HasField("checkpoint"):
            record.step = result.checkpoint.step
    marks = RunMarks(record.step, record.failure_seq, record.failure)
    if loss.HasField("added_head"):
        record.config.head = loss.added_head.kind
        record.num_trainable_parameters = loss.added_head.num_trainable_parameters
        marks = replace(
            marks,
            config=record.config.SerializeToString(),
            num_trainable_parameters=record.num_trainable_parameters,
        )
    return marks
