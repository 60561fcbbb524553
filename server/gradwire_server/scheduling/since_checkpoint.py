"""What a run has done since its newest checkpoint."""

from __future__ import annotations

from bisect import bisect_left, insort

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.scheduling.operation import drops_accumulation, is_replayed_with


class SinceCheckpoint:
    """Counters of one run since its newest checkpoint, and the steps that ended an accumulation without succeeding.

    Attributes:
        steps: Optimizer steps that a recovery would replay.
        bytes: Bytes that the journal holds for a recovery.
    """

    def __init__(self) -> None:
        self.steps = self.bytes = 0
        self._dropped_steps: list[int] = []

    def restart(self) -> None:
        """Count from here."""
        self.steps = self.bytes = 0

    def count(self, header: pb.OperationHeader, status: pb.Status.ValueType) -> None:
        """Count an operation with a result."""
        if drops_accumulation(header.operation, status):
            insort(self._dropped_steps, header.seq)
        self.bytes += header.ByteSize()
        if is_replayed_with(header.operation, status):
            self.steps += header.operation.WhichOneof("kind") == "optim_step"
            self.bytes += header.payload_bytes

    def dropped_step(self, seq: int) -> int:
        """The newest operation before this number that ended an accumulation without succeeding; 0 for none."""
        before = bisect_left(self._dropped_steps, seq)
        del self._dropped_steps[: max(before - 1, 0)]
        return self._dropped_steps[0] if before else 0

    def forget(self) -> None:
        """Forget the steps that ended an accumulation, after a rewind."""
        self._dropped_steps.clear()
