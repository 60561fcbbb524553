"""The operations of one run in order of number: which is next, which wait, and which a failure aborts.

Rules
  * Numbers are contiguous from 1. An operation that arrives early waits in a bounded window, in memory and
    unacknowledged, until the numbers before it have arrived; then it is journaled and acknowledged. So every
    acknowledged operation gets a result, and a writer that leaves a gap leaves nothing for the next writer to repair.
  * After a failure, the operations up to and including the next optim_step are aborted, except one whose writer
    had already seen the failure: it and those after it run. An aborted optim_step ends the failure; an optim_step that
    fails by itself starts a new one.
  * An optim_step or a zero_grad ends its accumulation whatever its result. If it did not succeed, the requests of
    later operations tell the engine so.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import Usage, tokens_of
from gradwire_server.config import Limits
from gradwire_server.errors import ServiceError
from gradwire_server.journal.journal import RunMarks, StoredResult
from gradwire_server.journal.run_records import RunRecord
from gradwire_server.scheduling.operation import QueuedOperation, drops_accumulation, failed, is_replayed_with

RECENT_RESULTS = 64
RECENT_BYTES = 64 << 10
"""The newest ``RECENT_RESULTS`` results with payloads up to this size are served from memory."""


@dataclass(eq=False)
class RunQueue:
    """The queue of one run, and the server's state of the run outside the database.

    Attributes:
        record: The run's row.
        limits: The server's limits.
        usage: What the run's key holds; shared by its runs.
        window: Operations that wait for a missing number, by number.
        pending: Admitted operations without a result, by number.
        sent: Operations that were sent to the engine or are about to be, in order.
        apart: Whether nothing more may be sent until those in ``sent`` are answered.
        handing: Lock held while an operation is sent to the engine; keeps them in order.
        finishing: Lock held while an answered operation waits for its journal write; keeps results in order.
        generation: Generation of the engine process that holds the run; 0 for none.
        replay_deaths: Engine crashes during the replay of an operation, by number.
        behind_checkpoint: Since the newest checkpoint: optimizer steps that a recovery would replay, and bytes that
            the journal holds for it.
        closed: Error for readers and writers once the run is closed.
    """

    record: RunRecord
    limits: Limits
    usage: Usage
    window: dict[int, QueuedOperation] = field(default_factory=dict)
    pending: OrderedDict[int, QueuedOperation] = field(
        default_factory=OrderedDict
    )  # popping from the front of a plain dict makes the next look at its first item slow
    sent: dict[int, QueuedOperation] = field(default_factory=dict)
    apart: bool = False
    handing: asyncio.Lock = field(default_factory=asyncio.Lock)
    finishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    generation: int = 0
    replay_deaths: dict[int, int] = field(default_factory=dict)
    behind_checkpoint: tuple[int, int] = (0, 0)
    closed: ServiceError | None = None

    def __post_init__(self) -> None:
        self.next_seq = self.record.accepted_seq + 1
        self.queued_bytes = 0
        self._last_sent = 0
        self._gap = False
        self._stored: set[int] = set()
        self._recent: OrderedDict[int, StoredResult] = OrderedDict()
        self._changed = asyncio.Event()
        self._dropped_steps: list[int] = []

    # ---- admission ----

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

    def offer(self, operation: QueuedOperation) -> asyncio.Future[pb.SubmitAck] | None:
        """Put an operation into the window. If it was submitted before and has no result yet, return its ack instead.

        Raises:
            ServiceError: SEQ_REUSED, SEQ_GAP, LIMIT_EXCEEDED. The number is not consumed.
        """
        seq, limits = operation.seq, self.limits
        known = self.window.get(seq) or self.pending.get(seq)
        if known is not None:
            if known.content != operation.content:
                raise reused(seq)
            return known.ack
        if seq >= self.next_seq + limits.max_window:
            raise ServiceError(
                pb.ERROR_CODE_SEQ_GAP,
                f"operation {seq} is too far ahead: {self.next_seq} is expected next, and at most {limits.max_window}"
                " numbers wait (--limit max_window=N); submit the missing ones first",
            )
        closes_gap = seq == self.next_seq and bool(self.window)
        if len(self.window) + len(self.pending) >= limits.max_queued_operations and not closes_gap:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"the run has {limits.max_queued_operations} operations queued (--limit max_queued_operations=N); await"
                " some results, then submit this one again",
            )
        size = operation.header.payload_bytes
        if self.queued_bytes + size > limits.max_queued_bytes and self.queued_bytes and not closes_gap:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"the run's queued operations hold {self.queued_bytes} bytes, and this one would pass"
                f" {limits.max_queued_bytes} (--limit max_queued_bytes=N); await some results, then"
                " submit this one again",
            )
        waiting = sum(each.header.payload_bytes for each in self.window.values())
        if seq > self.next_seq and waiting and waiting + size > limits.max_window_bytes:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"{waiting} bytes wait for operation {self.next_seq}, and this one would pass {limits.max_window_bytes}"
                " (--limit max_window_bytes=N); submit the missing one, then this one again",
                rule=f"max_window_bytes = {limits.max_window_bytes}",
            )
        if not closes_gap:
            self.usage.check(size, tokens_of(operation.header.operation, operation.header.tensors))
        self.window[seq] = operation
        self.hold(operation)
        return None

    def hold(self, operation: QueuedOperation) -> None:
        """Count an operation without a result against the run's and the key's limits."""
        self.queued_bytes += operation.header.payload_bytes
        self.usage.operations += 1
        self.usage.bytes += operation.header.payload_bytes

    def _release(self, operation: QueuedOperation) -> None:
        self.queued_bytes -= operation.header.payload_bytes
        self.usage.operations -= 1
        self.usage.bytes -= operation.header.payload_bytes

    def admit(self) -> list[QueuedOperation]:
        """Move the operations whose turn has come from the window to ``pending``, and return them for the journal."""
        admitted = []
        while (operation := self.window.pop(self.next_seq, None)) is not None:
            self.pending[self.next_seq] = operation
            self.next_seq += 1
            admitted.append(operation)
        return admitted

    def refuse(self, operation: QueuedOperation, error: BaseException) -> None:
        """Remove an operation that could not be journaled; its number is free again.

        If the engine may have started it already, the run is restored there, which discards its effects.
        """
        if self.sent.get(operation.seq) is operation:
            self.generation = 0
        self._drop(operation)
        self.next_seq = min(self.next_seq, operation.seq)
        if not operation.ack.done():
            operation.ack.set_exception(error)

    def fence(self) -> None:
        """Refuse the operations in the window: a new writer starts after the last accepted number."""
        waiting, self.window = self.window, {}
        for operation in waiting.values():
            self._release(operation)
            if not operation.ack.done():
                try:
                    self.check_epoch(operation.header.epoch)
                except ServiceError as error:
                    operation.ack.set_exception(error)

    # ---- execution ----

    @property
    def head(self) -> QueuedOperation | None:
        """The next operation to send to the engine; None if there is none."""
        if self.closed is not None:
            return None
        for seq in range(self._last_sent + 1, self.next_seq) if self.sent else self.pending:
            head = self.pending.get(seq)
            if head is not None and not head.cancelled and seq not in self.sent:
                return head
        return None

    def may_follow(self, operation: QueuedOperation) -> bool:
        """Whether an operation may be sent before earlier ones have results, or before it is journaled itself.

        It may not if an earlier operation failed to be journaled, as its number is then no longer below ``next_seq``.
        """
        there = operation.durable or (operation.early and operation.seq < self.next_seq)
        return there and not (self.apart or self.record.failure_seq or operation.refusal or operation.apart)

    def send(self, operation: QueuedOperation) -> None:
        """Mark an operation as sent."""
        self.sent[operation.seq] = operation
        self._last_sent = operation.seq
        self.apart = operation.apart

    def back(self, operation: QueuedOperation) -> None:
        """Unmark a sent operation that has its result or must be sent again.

        If it must be sent again, the later ones in ``sent`` may no longer be handed to the engine before it.
        """
        operation.answer = None
        if self.sent.get(operation.seq) is operation:
            del self.sent[operation.seq]
        self._gap = bool(self.sent) and (self._gap or operation.seq in self.pending)
        self.apart = bool(self.sent) and (self.apart or self._gap)

    def is_next(self, operation: QueuedOperation) -> bool:
        """Whether a sent operation may be handed to the engine, given that every earlier one was."""
        there = self.pending.get(operation.seq) is operation and not operation.cancelled
        return there and not self._gap and not self.record.failure_seq

    def is_first(self, operation: QueuedOperation) -> bool:
        """Whether every operation before this one has a result."""
        return next(iter(self.pending.values()), None) is operation

    def verdict(self, operation: QueuedOperation) -> pb.OperationResult | None:
        """The result of an operation that must not be executed, aborted or refused; None if it must be executed."""
        record = self.record
        if record.failure_seq and operation.header.failure_seen >= record.failure_seq:
            record.failure_seq, record.failure = 0, ""
        if record.failure_seq:
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

    def finish(self, operation: QueuedOperation, result: pb.OperationResult) -> RunMarks:
        """Apply a result to the run; return the values for the run's row."""
        record = self.record
        self._drop(operation)
        if result.status == pb.STATUS_FAILED:
            if result.error.code != pb.ERROR_CODE_ABORTED_PREDECESSOR:
                record.failure_seq, record.failure = operation.seq, result.error.message
            elif operation.kind == "optim_step":
                record.failure_seq, record.failure = 0, ""
        self.count(operation.header, result.status)
        if result.status == pb.STATUS_SUCCEEDED:
            if operation.kind == "save_checkpoint":
                self.behind_checkpoint = (0, 0)
            elif operation.kind == "optim_step":
                record.step = result.optim_step.step
            elif operation.kind == "load_checkpoint" and result.HasField("checkpoint"):
                record.step = result.checkpoint.step
        return RunMarks(record.step, record.failure_seq, record.failure)

    def count(self, header: pb.OperationHeader, status: pb.Status.ValueType) -> None:
        """Count the journal's bytes and the replayed steps of an operation since the newest checkpoint."""
        if drops_accumulation(header.operation, status):
            insort(self._dropped_steps, header.seq)
        steps, size = self.behind_checkpoint
        size += header.ByteSize()
        if is_replayed_with(header.operation, status):
            steps += header.operation.WhichOneof("kind") == "optim_step"
            size += header.payload_bytes
        self.behind_checkpoint = (steps, size)

    def dropped_step(self, seq: int) -> int:
        """The newest operation before this number that ended an accumulation without succeeding; 0 for none."""
        before = bisect_left(self._dropped_steps, seq)
        del self._dropped_steps[: max(before - 1, 0)]
        return self._dropped_steps[0] if before else 0

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

    def _drop(self, operation: QueuedOperation) -> None:
        if self.pending.pop(operation.seq, None) is not None:
            self._release(operation)

    # ---- results ----

    def stored(self, result: StoredResult) -> None:
        """Publish a durable result to readers, and keep it in memory if it is small."""
        if len(result.payload) <= RECENT_BYTES:
            self._recent[result.header.seq] = result
            if len(self._recent) > RECENT_RESULTS:
                self._recent.popitem(last=False)
        self.skip(result.header.seq)

    def skip(self, seq: int) -> None:
        """Mark a result as durable without keeping it in memory."""
        self._stored.add(seq)
        while self.record.applied_seq + 1 in self._stored:
            self.record.applied_seq += 1
            self._stored.discard(self.record.applied_seq)
        self.notify()

    def recent(self, seq: int) -> list[StoredResult]:
        """The durable results from this number on that are in memory without a gap."""
        there = map(self._recent.get, range(seq, self.record.applied_seq + 1))
        return [result for result in takewhile(lambda result: result is not None, there) if result is not None]

    def released(self, up_to_seq: int) -> None:
        """Drop released results from memory and wake their readers."""
        self.record.released_seq = max(self.record.released_seq, up_to_seq)
        for seq in [seq for seq in self._recent if seq <= up_to_seq]:
            del self._recent[seq]
        self.notify()

    def reset(self) -> None:
        """Empty the queue after a rewind, and drop results after the point of the rewind."""
        error = self.rewound()
        for operation in [*self.pending.values(), *self.window.values()]:
            if not operation.ack.done():
                operation.ack.set_exception(error)
        self.empty()
        self._stored.clear()
        self._recent.clear()
        self._dropped_steps.clear()
        self.next_seq = self.record.accepted_seq + 1
        self.notify()

    def empty(self) -> None:
        """Remove every queued operation."""
        for operation in [*self.pending.values(), *self.window.values()]:
            self._release(operation)
        self.pending.clear()
        self.window.clear()

    def close(self, reason: ServiceError) -> None:
        """Close the run: fail its readers and unacknowledged submissions with ``reason``."""
        self.closed = reason
        for operation in [*self.pending.values(), *self.window.values()]:
            if not operation.ack.done():
                operation.ack.set_exception(reason)
        self.notify()

    def notify(self) -> None:
        """Wake everyone who waits for :attr:`changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Event set at the next change of the queue; take it before you read the state, or you can miss a change."""
        return self._changed


def reused(seq: int) -> ServiceError:
    """SEQ_REUSED for a number that another operation has."""
    return ServiceError(
        pb.ERROR_CODE_SEQ_REUSED,
        f"number {seq} was used for another operation; a new operation takes a new number",
        field="seq",
    )
