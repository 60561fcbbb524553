"""The order of one run: which number comes next, what waits for it, and what a failure takes with it.

Rules
  * Numbers are contiguous from 1. One that comes early waits in a bounded window, in memory and unacknowledged,
    until the gap before it is closed; then it is journaled and acknowledged. So whatever was acknowledged will be
    carried out, and a writer that leaves a gap behind leaves nothing that the next writer must work around.
  * What is behind a failure, through the next optim_step, is aborted, unless whoever submitted it had been told
    of the failure. A step that is aborted ends it; a step that fails by itself begins a new one.
  * A step ends its accumulation whatever becomes of it. The engine is told of one that it did not carry out with the
    operation that comes next.
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
"""Results no larger than this are handed to their readers from memory."""


@dataclass(eq=False)
class RunQueue:
    """What the front keeps of a run.

    Attributes:
        sent: the operations that are being carried out, in order: those that were handed to the engine, or are about
            to be.
        apart: whether nothing may be sent behind them now.
        handing: held while one of them is handed to the engine, in their order.
        finishing: held while one that the engine has answered waits to be in the journal, in their order.
        generation: of the engine process that holds it.
        behind_checkpoint: optimizer steps that a recovery would repeat, and bytes that the journal holds for it.
    """

    record: RunRecord
    limits: Limits
    usage: Usage
    window: dict[int, QueuedOperation] = field(default_factory=dict)
    pending: OrderedDict[int, QueuedOperation] = field(
        default_factory=OrderedDict
    )  # a dict's front is slow to find again
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

    # ---- coming in ----

    def check_epoch(self, epoch: int) -> None:
        """
        Raises:
            ServiceError: STALE_EPOCH; REWOUND when it is stale because the run went back.
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
        return ServiceError(
            pb.ERROR_CODE_REWOUND,
            f"the run {self.record.run_id} went back to operation {self.record.rewound_to_seq} (durability=checkpoint"
            " and the engine was restarted): later operations are void; open the run again and go on from there",
        )

    def offer(self, operation: QueuedOperation) -> asyncio.Future[pb.SubmitAck] | None:
        """Lets an operation wait for its turn. Gives the acknowledgement of an equal one that waits already.

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
        """Counts what an operation without a result takes."""
        self.queued_bytes += operation.header.payload_bytes
        self.usage.operations += 1
        self.usage.bytes += operation.header.payload_bytes

    def _release(self, operation: QueuedOperation) -> None:
        self.queued_bytes -= operation.header.payload_bytes
        self.usage.operations -= 1
        self.usage.bytes -= operation.header.payload_bytes

    def admit(self) -> list[QueuedOperation]:
        """The operations whose turn to be journaled has come."""
        admitted = []
        while (operation := self.window.pop(self.next_seq, None)) is not None:
            self.pending[self.next_seq] = operation
            self.next_seq += 1
            admitted.append(operation)
        return admitted

    def refuse(self, operation: QueuedOperation, error: BaseException) -> None:
        """Takes back an operation that could not be journaled: its number is free again. What the engine may have made
        of it meanwhile is given up with the run, which is restored there."""
        if self.sent.get(operation.seq) is operation:
            self.generation = 0
        self._drop(operation)
        self.next_seq = min(self.next_seq, operation.seq)
        if not operation.ack.done():
            operation.ack.set_exception(error)

    def fence(self) -> None:
        """Refuses what waits for a gap to be closed: a new writer begins behind the last accepted number."""
        waiting, self.window = self.window, {}
        for operation in waiting.values():
            self._release(operation)
            if not operation.ack.done():
                try:
                    self.check_epoch(operation.header.epoch)
                except ServiceError as error:
                    operation.ack.set_exception(error)

    # ---- carrying out ----

    @property
    def head(self) -> QueuedOperation | None:
        """The next operation to carry out, now or later."""
        if self.closed is not None:
            return None
        for seq in range(self._last_sent + 1, self.next_seq) if self.sent else self.pending:
            head = self.pending.get(seq)
            if head is not None and not head.cancelled and seq not in self.sent:
                return head
        return None

    def may_follow(self, operation: QueuedOperation) -> bool:
        """Whether an operation may be sent although others before it have no results yet, or it is not in the journal:
        not behind one that could not be journaled."""
        there = operation.durable or (operation.early and operation.seq < self.next_seq)
        return there and not (self.apart or self.record.failure_seq or operation.refusal or operation.apart)

    def send(self, operation: QueuedOperation) -> None:
        self.sent[operation.seq] = operation
        self._last_sent = operation.seq
        self.apart = operation.apart

    def back(self, operation: QueuedOperation) -> None:
        """It has its result, or is to be sent again; then those behind it are not to be handed over before it."""
        operation.answer = None
        if self.sent.get(operation.seq) is operation:
            del self.sent[operation.seq]
        self._gap = bool(self.sent) and (self._gap or operation.seq in self.pending)
        self.apart = bool(self.sent) and (self.apart or self._gap)

    def is_next(self, operation: QueuedOperation) -> bool:
        """Whether an operation that was sent may be handed over, now that those before it were."""
        there = self.pending.get(operation.seq) is operation and not operation.cancelled
        return there and not self._gap and not self.record.failure_seq

    def is_first(self, operation: QueuedOperation) -> bool:
        """Whether every operation before this one has a result."""
        return next(iter(self.pending.values()), None) is operation

    def verdict(self, operation: QueuedOperation) -> pb.OperationResult | None:
        """The result of an operation that is not to be carried out; None for one that is."""
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
        """Takes a result into account; gives what it changes of the run's row."""
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
        """Takes into account what the journal holds of an operation, and whether a recovery would repeat it."""
        if drops_accumulation(header.operation, status):
            insort(self._dropped_steps, header.seq)
        steps, size = self.behind_checkpoint
        size += header.ByteSize()
        if is_replayed_with(header.operation, status):
            steps += header.operation.WhichOneof("kind") == "optim_step"
            size += header.payload_bytes
        self.behind_checkpoint = (steps, size)

    def dropped_step(self, seq: int) -> int:
        """The newest step before this number that was not carried out; 0 for none."""
        before = bisect_left(self._dropped_steps, seq)
        del self._dropped_steps[: max(before - 1, 0)]
        return self._dropped_steps[0] if before else 0

    async def settled(self, seq: int) -> bool:
        """Waits until the results up to this number are durable; False when the run is closed or went back before."""
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
        """A result is durable: its readers may have it."""
        if len(result.payload) <= RECENT_BYTES:
            self._recent[result.header.seq] = result
            if len(self._recent) > RECENT_RESULTS:
                self._recent.popitem(last=False)
        self.skip(result.header.seq)

    def skip(self, seq: int) -> None:
        """Marks a result as durable without keeping it."""
        self._stored.add(seq)
        while self.record.applied_seq + 1 in self._stored:
            self.record.applied_seq += 1
            self._stored.discard(self.record.applied_seq)
        self.notify()

    def recent(self, seq: int) -> list[StoredResult]:
        """The results from this number on that are in memory, as far as they may be seen."""
        there = map(self._recent.get, range(seq, self.record.applied_seq + 1))
        return [result for result in takewhile(lambda result: result is not None, there) if result is not None]

    def released(self, up_to_seq: int) -> None:
        self.record.released_seq = max(self.record.released_seq, up_to_seq)
        for seq in [seq for seq in self._recent if seq <= up_to_seq]:
            del self._recent[seq]
        self.notify()

    def reset(self) -> None:
        """After a rewind: nothing queued, nothing stored past the mark."""
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
        """Lets go of everything queued."""
        for operation in [*self.pending.values(), *self.window.values()]:
            self._release(operation)
        self.pending.clear()
        self.window.clear()

    def close(self, reason: ServiceError) -> None:
        """Ends every reader with this error, and every unacknowledged submission."""
        self.closed = reason
        for operation in [*self.pending.values(), *self.window.values()]:
            if not operation.ack.done():
                operation.ack.set_exception(reason)
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before looking."""
        return self._changed


def reused(seq: int) -> ServiceError:
    return ServiceError(
        pb.ERROR_CODE_SEQ_REUSED,
        f"number {seq} was used for another operation; a new operation takes a new number",
        field="seq",
    )
