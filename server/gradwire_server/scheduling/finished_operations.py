"""Finished operations of a run in memory: the newest results, a log, the cost of a recovery."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.rows import StoredResult
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.operation_kinds import kind_of, loss_call
from gradwire_server.scheduling.operation import OperationState, QueuedOperation, drops_accumulation, is_replayed_with

RECENT_RESULTS = 64
RECENT_BYTES = 64 << 10
"""The newest ``RECENT_RESULTS`` results with payloads up to this size are served from memory."""


class RecentResults:
    """The durable results of one run; advances the record's ``applied_seq`` and ``released_seq``."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._stored: set[int] = set()
        self._recent: OrderedDict[int, StoredResult] = OrderedDict()

    def add(self, result: StoredResult) -> None:
        """Count a durable result, and keep it in memory if it is small."""
        if len(result.payload) <= RECENT_BYTES:
            self._recent[result.header.seq] = result
            if len(self._recent) > RECENT_RESULTS:
                self._recent.popitem(last=False)
        self.count(result.header.seq)

    def count(self, seq: int) -> None:
        """Count a durable result without keeping it in memory."""
        self._stored.add(seq)
        while self._record.applied_seq + 1 in self._stored:
            self._record.applied_seq += 1
            self._stored.discard(self._record.applied_seq)

    def since(self, seq: int) -> list[StoredResult]:
        """The durable results from this number on that are in memory without a gap."""
        there = map(self._recent.get, range(seq, self._record.applied_seq + 1))
        return [result for result in takewhile(lambda result: result is not None, there) if result is not None]

    def release(self, up_to_seq: int) -> None:
        """Drop released results from memory."""
        self._record.released_seq = max(self._record.released_seq, up_to_seq)
        for seq in [seq for seq in self._recent if seq <= up_to_seq]:
            del self._recent[seq]

    def clear(self) -> None:
        """Forget everything, after a rewind."""
        self._stored.clear()
        self._recent.clear()


KEPT = 256
ENDS = {pb.STATUS_SUCCEEDED: "succeeded", pb.STATUS_FAILED: "failed", pb.STATUS_CANCELLED: "cancelled"}
STATES = {
    OperationState.WAITING: "waiting",
    OperationState.EARLY: "executing",
    OperationState.SENT: "executing",
    OperationState.CANCELLING: "cancelled",
}


class OperationLog:
    """The newest operations of one run.

    Attributes:
        recoveries: How often the run was brought back into an engine since the server started.
    """

    def __init__(self) -> None:
        self._finished: deque[pb.OperationEntry] = deque(maxlen=KEPT)
        self.recoveries = 0

    def finished(self, operation: QueuedOperation, result: pb.OperationResult) -> None:
        """Note an operation that has its result."""
        entry = _entry(operation, ENDS.get(result.status, ""))
        entry.queue_s, entry.engine_s = result.timings.queue_s, result.timings.engine_s
        entry.front_s = max(time.time() - operation.accepted_at - entry.queue_s - entry.engine_s, 0.0)
        if result.HasField("error"):
            entry.error.CopyFrom(result.error)
        self._finished.append(entry)

    def newest(self, unfinished: Iterable[QueuedOperation], limit: int) -> list[pb.OperationEntry]:
        """The newest operations, newest first: those without a result, then those that have one."""
        now = time.time()
        entries = []
        for operation in unfinished:
            entry = _entry(operation, STATES.get(operation.state, "queued"))
            entry.queue_s = max(now - operation.accepted_at, 0.0)
            entries.append(entry)
        return sorted([*entries, *self._finished], key=lambda entry: -entry.seq)[:limit]


def _entry(operation: QueuedOperation, state: str) -> pb.OperationEntry:
    call = loss_call(operation.header.operation)
    return pb.OperationEntry(
        seq=operation.seq,
        operation=operation.kind,
        loss_fn=call.loss_fn if call is not None else "",
        state=state,
        accepted_at=operation.accepted_at,
        deaths=operation.deaths,
        retried=operation.retried,
        payload_bytes=operation.header.payload_bytes,
    )


@dataclass
class Work:
    """Operations of a run, as a recovery sees them.

    Attributes:
        steps: Optimizer steps that a recovery would replay.
        bytes: Bytes that the journal holds for a recovery.
        engine_s: Seconds of the engine that a recovery would spend on replaying, as measured when the operations were
            executed. Samples, scores and other reads are not replayed and add nothing.
    """

    steps: int = 0
    bytes: int = 0
    engine_s: float = 0.0


class RecoveryCost:
    """Counters of one run since its newest checkpoint, and the steps that ended an accumulation without succeeding.

    Attributes:
        since_attempt: The part of it since an automatic checkpoint was last tried.
        loading_s: Seconds that the engine took to make or load the run's state the last time; 0 before the first time.
        saving_s: Seconds that the last automatic checkpoint took; 0 before the first one.
        replay_deaths: Number of engines that died while they replayed an operation, by its number, since the last
            replay that succeeded.
    """

    def __init__(self) -> None:
        self.work, self.since_attempt = Work(), Work()
        self.loading_s = self.saving_s = 0.0
        self.replay_deaths: Counter[int] = Counter()
        self._dropped_steps: list[int] = []

    @property
    def recovery_s(self) -> float:
        """Seconds that bringing the run back into a new engine would take now."""
        return self.loading_s + self.work.engine_s

    def attempt(self) -> None:
        """Record that an automatic checkpoint is tried now."""
        self.since_attempt = Work()

    def saved(self) -> None:
        """Record that the automatic checkpoint that was tried last is the newest now."""
        self.work = Work(**vars(self.since_attempt))

    def restart(self) -> None:
        """Count from here."""
        self.work, self.since_attempt = Work(), Work()

    def found(self, engine_s: float) -> None:
        """Take over what the journal says that replaying takes, where the operations were not counted one by one."""
        self.work.engine_s = engine_s

    def count(self, header: pb.OperationHeader, status: pb.Status.ValueType, engine_s: float) -> None:
        """Count an operation with a result, which took the engine so many seconds."""
        if drops_accumulation(header.operation, status):
            insort(self._dropped_steps, header.seq)
        size, steps = header.ByteSize(), 0
        if is_replayed_with(header.operation, status):
            size, steps = size + header.payload_bytes, int(kind_of(header.operation).steps)
        else:
            engine_s = 0.0
        for work in (self.work, self.since_attempt):
            work.bytes += size
            work.steps += steps
            work.engine_s += engine_s

    def dropped_step(self, seq: int) -> int:
        """The newest operation before this number that ended an accumulation without succeeding; 0 for none."""
        before = bisect_left(self._dropped_steps, seq)
        del self._dropped_steps[: max(before - 1, 0)]
        return self._dropped_steps[0] if before else 0

    def forget(self) -> None:
        """Forget everything that was done since the newest checkpoint, after a rewind to it."""
        self.restart()
        self._dropped_steps.clear()
