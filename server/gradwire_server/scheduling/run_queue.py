"""The operations of one run in order of number: who may submit one, which is next, and which wait.

Rules
  * Only the writer with the run's present epoch submits, and a new operation only under a new number.
  * Numbers are contiguous from 1. An operation that arrives early waits in a bounded window, in memory and
    unacknowledged, until the numbers before it have arrived; then it is journaled and acknowledged. So every
    acknowledged operation gets a result, and a writer that leaves a gap leaves nothing for the next writer to repair.
  * What a failure aborts: :mod:`.operation`.
  * An optim_step, a train_step or a zero_grad ends its accumulation whatever its result. If it did not succeed, the
    requests of later operations tell the engine so.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import Usage
from gradwire_server.engine_client.client import EngineAnswer, Holder
from gradwire_server.errors import ServiceError, parked_error
from gradwire_server.journal.rows import JournalEntry, RunMarks, StoredResult
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Location
from gradwire_server.limits import Limits
from gradwire_server.scheduling.finished_operations import OperationLog, RecentResults, RecoveryCost
from gradwire_server.scheduling.held_operations import HeldOperations
from gradwire_server.scheduling.operation import (
    UNSENT,
    OperationState,
    Parked,
    QueuedOperation,
    aborts,
    apply_result,
    expired,
)


class Fencing:
    """The check that keeps older writers of a run out."""

    record: RunRecord

    def check_epoch(self, epoch: int) -> None:
        """Check that an epoch is the current writer's.

        Raises:
            ServiceError: STALE_EPOCH; REWOUND if the epoch is from before the run's last rewind.
        """
        record = self.record
        if epoch == record.epoch:
            return
        if 0 < epoch <= record.rewound_epoch:
            raise self.rewound()
        raise ServiceError(
            pb.ERROR_CODE_STALE_EPOCH,
            f"another writer ({record.writer or 'unknown'}) has taken over the run {record.run_id}: this one writes"
            f" with epoch {epoch}, the run is at {record.epoch}; open the run again to take it back",
        )

    def rewound(self) -> ServiceError:
        """The error for readers and writers from before the run's last rewind."""
        return ServiceError(
            pb.ERROR_CODE_REWOUND,
            f"the run {self.record.run_id} went back to operation {self.record.rewound_to_seq} (durability=checkpoint"
            " and the engine was restarted): later operations are void; open the run again and go on from there",
        )


def reused(seq: int) -> ServiceError:
    """SEQ_REUSED for a number that another operation has."""
    return ServiceError(
        pb.ERROR_CODE_SEQ_REUSED,
        f"number {seq} was used for another operation; a new operation takes a new number",
        field="seq",
    )


@dataclass(eq=False)
class RunQueue(Fencing):
    """The queue of one run, and the server's state of the run outside the database.

    Only the queue changes the states of its operations and the progress in the run's record.

    Attributes:
        usage: The usage of the run's key; shared by its runs.
        held: The share of the limits that operations without a result hold.
        window: Operations that wait for a missing number, by number.
        pending: Admitted operations without a result, by number; in an OrderedDict, as a plain dict is slow to
            show its first item once others were popped in front of it.
        sent: Operations that were sent to the engine or are about to be, in order.
        apart: Whether nothing more may be sent until those in ``sent`` are answered.
        handing: Lock held while an operation is sent to the engine; keeps them in order.
        finishing: Lock held while an answered operation waits for its journal write; keeps results in order.
        holder: The process of an engine that holds the run, or held it until it ended; None for none.
        recovery_cost: The operations that a recovery would replay, and their time.
        log: Its newest operations with a result.
        closed: Error for readers and writers once the run is closed.
        parked: Why and since when the run is parked; None if it is not. See :class:`.Parking`.
        on_change: Called whenever the run's description may have changed.
    """

    record: RunRecord
    limits: Limits
    usage: Usage
    on_change: Callable[[], object]
    window: dict[int, QueuedOperation] = field(default_factory=dict)
    pending: OrderedDict[int, QueuedOperation] = field(default_factory=OrderedDict)
    sent: dict[int, QueuedOperation] = field(default_factory=dict)
    apart: bool = False
    handing: asyncio.Lock = field(default_factory=asyncio.Lock)
    finishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    holder: Holder | None = None
    recovery_cost: RecoveryCost = field(default_factory=RecoveryCost)
    log: OperationLog = field(default_factory=OperationLog)
    closed: ServiceError | None = None
    parked: Parked | None = None

    def __post_init__(self) -> None:
        self.next_seq = self.record.accepted_seq + 1
        self.held = HeldOperations(self.limits, self.usage)
        self._last_sent = self._held_back = self._saveable = 0
        self._reading: set[asyncio.Future[EngineAnswer]] = set()
        self._gap = False
        self._cancelled_steps: set[int] = set()
        self._results = RecentResults(self.record)
        self._changed = asyncio.Event()

    # ---- admission ----

    def offer(self, operation: QueuedOperation) -> asyncio.Future[pb.SubmitAck] | None:
        """Put an operation into the window. If it was submitted before and has no result yet, return its ack instead.

        Raises:
            ServiceError: SEQ_REUSED, SEQ_GAP, LIMIT_EXCEEDED, RUN_PARKED. The number is not consumed.
        """
        seq = operation.seq
        known = self.window.get(seq) or self.pending.get(seq)
        if known is not None:
            if known.content != operation.content:
                raise reused(seq)
            return known.ack
        if self.parked is not None:
            raise parked_error(self.record.run_id, self.parked.error)
        self.held.check(operation, self.next_seq, self.window.values())
        operation.enter(OperationState.WAITING)
        self.window[seq] = operation
        self.held.add(operation)
        return None

    def load(self, operation: QueuedOperation) -> None:
        """Queue an operation that the journal holds from before the server started."""
        operation.enter(OperationState.QUEUED)
        self.pending[operation.seq] = operation
        self.held.add(operation)

    def find(self, seq: int) -> QueuedOperation | None:
        """The operation with this number that has no result; None if there is none."""
        return self.window.get(seq) or self.pending.get(seq)

    @property
    def unfinished(self) -> list[QueuedOperation]:
        """Every operation without a result."""
        return [*self.pending.values(), *self.window.values()]

    def admit(self) -> list[QueuedOperation]:
        """Move the operations whose turn has come from the window to ``pending``, and return them for the journal."""
        admitted = []
        while (operation := self.window.pop(self.next_seq, None)) is not None:
            self.pending[self.next_seq] = operation
            self.next_seq += 1
            if operation.state is OperationState.WAITING:
                operation.enter(OperationState.WRITING)
            admitted.append(operation)
        return admitted

    def journaled(self, operation: QueuedOperation, location: Location | None) -> bool:
        """Record that an operation is in the journal; False if a rewind or deletion has removed it meanwhile."""
        if self.pending.get(operation.seq) is not operation:
            return False
        operation.location = location
        if operation.state is not OperationState.CANCELLING:
            early = operation.state is OperationState.EARLY
            operation.enter(OperationState.SENT if early else OperationState.QUEUED)
        self.record.accepted_seq = max(self.record.accepted_seq, operation.seq)
        self.on_change()
        return True

    def refuse(self, operation: QueuedOperation, error: BaseException) -> None:
        """Remove an operation that could not be journaled; its number is free again.

        If the engine may have started it already, the run is restored there, which discards its effects.
        """
        if self.sent.get(operation.seq) is operation:
            self.holder = None
        if self._drop(operation):
            operation.enter(OperationState.DROPPED)
        self.next_seq = min(self.next_seq, operation.seq)
        if not operation.ack.done():
            operation.ack.set_exception(error)

    def fence(self) -> None:
        """Refuse the operations in the window: a new writer starts after the last accepted number."""
        waiting, self.window = self.window, {}
        for operation in waiting.values():
            operation.enter(OperationState.DROPPED)
            self.held.remove(operation)
            self._cancelled_steps.discard(operation.seq)
            if not operation.ack.done():
                try:
                    self.check_epoch(operation.header.epoch)
                except ServiceError as error:
                    operation.ack.set_exception(error)

    # ---- execution ----

    @property
    def head(self) -> QueuedOperation | None:
        """The next operation to send to the engine; None if there is none."""
        if self._held_back or self.closed is not None or (self.parked is not None and not self.parked.trying):
            return None
        for seq in range(self._last_sent + 1, self.next_seq) if self.sent else self.pending:
            head = self.pending.get(seq)
            if head is not None and head.state in UNSENT and seq not in self.sent:
                return head
        return None

    def may_follow(self, operation: QueuedOperation) -> bool:
        """Whether an operation may be sent before earlier ones have results, or before it is journaled itself.

        It may not if an earlier operation failed to be journaled, as its number is then no longer below ``next_seq``.
        """
        there = operation.state is OperationState.QUEUED or (
            operation.state is OperationState.WRITING and operation.may_be_early and operation.seq < self.next_seq
        )
        return there and not (self.apart or self.record.failure_seq or operation.refusal or operation.apart)

    def send(self, operation: QueuedOperation) -> None:
        """Mark an operation as sent."""
        written = operation.state is OperationState.QUEUED
        operation.enter(OperationState.SENT if written else OperationState.EARLY)
        self.sent[operation.seq] = operation
        self._last_sent = operation.seq
        self.apart = operation.apart

    def handed(self, operation: QueuedOperation, answer: asyncio.Future[EngineAnswer]) -> None:
        """Keep the engine's pending answer to a sent operation."""
        operation.answer = answer

    def go_alone(self) -> None:
        """Send nothing more until the operations in :attr:`sent` are answered."""
        self.apart = True

    def back(self, operation: QueuedOperation) -> None:
        """Unmark a sent operation that has its result or must be sent again.

        If it must be sent again, the later ones in ``sent`` may no longer be handed to the engine before it.
        """
        operation.answer = None
        if self.sent.get(operation.seq) is operation:
            del self.sent[operation.seq]
        if operation.state is OperationState.SENT:
            operation.enter(OperationState.QUEUED)
        elif operation.state is OperationState.EARLY:
            operation.enter(OperationState.WRITING)
        self._gap = bool(self.sent) and (self._gap or operation.seq in self.pending)
        self.apart = bool(self.sent) and (self.apart or self._gap)
        self._left()

    def is_next(self, operation: QueuedOperation) -> bool:
        """Whether a sent operation may be handed to the engine, given that every earlier one was.

        If its number is not below ``next_seq``, an operation before it failed to be journaled, and so will this one.
        """
        there = operation.state in (OperationState.SENT, OperationState.EARLY) and operation.seq < self.next_seq
        if self.record.failure_seq and (aborts(self.record, operation) or not self.is_first(operation)):
            return False  # also if its writer has seen the failure: those before it get their results first
        return there and not (self._gap or self._held_back)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Hand nothing to an engine until the body ends, whose caller then wakes the queue."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1
            self.notify()

    @property
    def is_held_back(self) -> bool:
        """Whether nothing of the run is handed to an engine for now."""
        return self._held_back > 0

    def reads(self, answer: asyncio.Future[EngineAnswer]) -> None:
        """Keep the engine's pending answer to a request outside the queue that reads the run's weights."""
        self._reading.add(answer)
        answer.add_done_callback(self._has_read)

    def _has_read(self, answer: asyncio.Future[EngineAnswer]) -> None:
        self._reading.discard(answer)
        self._left()

    def _left(self) -> None:
        if self._held_back:
            self.notify()

    async def out_of_engine(self) -> None:
        """Wait until an engine does nothing for the run, which is held back."""
        while self.sent or self._reading:
            await self.changed.wait()

    def is_first(self, operation: QueuedOperation) -> bool:
        """Whether every operation before this one has a result."""
        return next(iter(self.pending.values()), None) is operation

    def finish(self, operation: QueuedOperation, result: pb.OperationResult) -> RunMarks:
        """Apply a result to the run; return the values for the run's row."""
        operation.enter(OperationState.FINISHED)
        self._drop(operation, result.status)
        executed = result.status == pb.STATUS_SUCCEEDED and operation.seq in self.sent
        self._saveable = operation.seq if executed and not operation.row.keeps_graph else 0
        self.recovery_cost.count(operation.header, result.status, result.timings.engine_s)
        marks = apply_result(self.record, operation, result)
        saved = operation.row.gives_checkpoint and result.status == pb.STATUS_SUCCEEDED
        if saved and not result.checkpoint.weights_only:
            self.checkpointed()
        return marks

    @property
    def saveable_seq(self) -> int:
        """The last operation with a result, if a checkpoint contains all that it left in the engine; 0 if not."""
        return self._saveable if self.is_held else 0

    def expire(self, operation: QueuedOperation) -> pb.Error:
        """Fail an operation whose deadline has passed, once the operations before it have their results.

        Those behind it that were sent must not be executed before that.
        """
        if operation.seq in self.sent:
            self._gap = self.apart = True
        operation.refusal = expired(operation.seq)
        return operation.refusal

    def cancel(self, operation: QueuedOperation) -> None:
        """Cancel an operation that is not in the journal yet; it gets its result once it is."""
        operation.enter(OperationState.CANCELLING)
        if operation.row.ends_accumulation:
            self._cancelled_steps.add(operation.seq)

    def dropped_step(self, seq: int) -> int:
        """The newest operation before this number that ended an accumulation without succeeding; 0 for none."""
        cancelled = max((each for each in self._cancelled_steps if each < seq), default=0)
        return max(cancelled, self.recovery_cost.dropped_step(seq))

    async def settled(self, seq: int) -> bool:
        """Wait until the results up to a number are durable; False if the run is closed or rewound first."""
        rewound_epoch = self.record.rewound_epoch
        while True:
            changed = self.changed
            if self.closed is not None or self.record.rewound_epoch != rewound_epoch:
                return False
            if self.record.applied_seq >= seq:
                return True
            await changed.wait()

    def _drop(self, operation: QueuedOperation, status: pb.Status.ValueType = pb.STATUS_UNSPECIFIED) -> bool:
        if self.pending.get(operation.seq) is not operation:
            return False
        del self.pending[operation.seq]
        self._cancelled_steps.discard(operation.seq)
        self.held.remove(operation, status)
        return True

    # ---- parking ----

    def park(self, error: pb.Error) -> None:
        """Execute nothing from now on; the run is restored in the engine before it goes on."""
        before = self.parked
        self.parked = Parked(error, before.since, before.attempts + 1) if before else Parked(error, time.time())
        self.holder = None
        self.notify()

    def try_again(self) -> None:
        """Try to go on, still parked."""
        if self.parked is not None:
            self.parked.trying = True

    def go_on(self) -> None:
        """End being parked."""
        self.parked = None
        self.notify()

    # ---- the run in the engine ----

    @property
    def is_held(self) -> bool:
        """Whether an engine holds the run."""
        return self.holder is not None and self.holder.alive

    @property
    def is_suspect(self) -> bool:
        """Whether its next operation, or the repetition of an earlier one, may have killed an engine."""
        first = next(iter(self.pending.values()), None)
        return (first is not None and first.deaths > 0) or bool(self.recovery_cost.replay_deaths)

    def let_go(self) -> None:
        """Record that no engine holds the run."""
        self.holder = None

    def held_by(self, holder: Holder) -> None:
        """Record that this process of an engine holds the run, which was just created."""
        self.holder = holder

    def restored(self, holder: Holder, part_bytes: int, entries: Sequence[JournalEntry]) -> None:
        """Record that this process of an engine holds the run, restored in front of these entries with a result.

        Args:
            part_bytes: As of :meth:`.HeldOperations.restored`.
        """
        self.holder = holder
        self.log.recoveries += 1
        self.recovery_cost.replay_deaths.clear()
        self.checkpointed()
        for entry in entries:
            self.recovery_cost.count(entry.header, entry.status, entry.replay_s)
        self.held.drop_parts(next(iter(self.pending), self.next_seq))
        self.held.restored(part_bytes, entries)

    def died(self, operation: QueuedOperation, suspect: bool) -> None:
        """Record that the engine died before it answered an operation, perhaps because of it if ``suspect``."""
        operation.retried = True
        operation.deaths += suspect

    def checkpointed(self) -> None:
        """Count :attr:`recovery_cost` from here."""
        self.recovery_cost.restart()

    # ---- results ----

    def stored(self, result: StoredResult, checkpoint: pb.Checkpoint | None) -> None:
        """Publish a durable result to readers, and the checkpoint that the operation has saved."""
        if checkpoint is not None:
            self.record.checkpoints[checkpoint.name] = checkpoint
        self._results.add(result)
        self.notify()

    def skip(self, seq: int) -> None:
        """Mark a result from before the server started as durable."""
        self._results.count(seq)
        self.notify()

    def recent(self, seq: int) -> list[StoredResult]:
        """The durable results from this number on that are in memory without a gap."""
        return self._results.since(seq)

    def released(self, up_to_seq: int) -> None:
        """Drop released results from memory and wake their readers."""
        self._results.release(up_to_seq)
        self.notify()

    def rewind(self, to_seq: int, step: int) -> None:
        """Empty the queue, and go back to the state after operation ``to_seq``, when the journal has done so."""
        record = self.record
        record.accepted_seq, record.applied_seq, record.step = to_seq, min(record.applied_seq, to_seq), step
        record.failure_seq, record.failure, record.writer = 0, "", ""
        record.rewound_to_seq, record.rewound_epoch, record.epoch = to_seq, record.epoch, record.epoch + 1
        self._refuse_all(self.rewound())
        self.empty()
        self._results.clear()
        self.recovery_cost.forget()
        self.next_seq = record.accepted_seq + 1
        self.notify()

    def empty(self) -> None:
        """Remove every queued operation."""
        for operation in self.unfinished:
            operation.enter(OperationState.DROPPED)
            self.held.remove(operation)
        self.held.drop_parts(self.next_seq)
        self.pending.clear()
        self.window.clear()
        self._cancelled_steps.clear()

    def close(self, reason: ServiceError) -> None:
        """Close the run: fail its readers and unacknowledged submissions with ``reason``."""
        self.closed = reason
        self._refuse_all(reason)
        self.notify()

    def _refuse_all(self, reason: ServiceError) -> None:
        for operation in self.unfinished:
            if not operation.ack.done():
                operation.ack.set_exception(reason)

    def notify(self) -> None:
        """Wake everyone who waits for :attr:`changed`."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    @property
    def changed(self) -> asyncio.Event:
        """Event set at the next change of the queue; take it before you read the state, or you can miss a change."""
        return self._changed
