"""The newest operations of a run that have a result, in memory, for people who ask what happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.operation_kinds import loss_call
from gradwire_server.scheduling.operation import QueuedOperation
from gradwire_server.scheduling.states import OperationState

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
