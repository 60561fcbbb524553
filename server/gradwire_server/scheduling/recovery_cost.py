"""What a run has done since its newest checkpoint, and what bringing the run back would cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.operation_kinds import kind_of
from gradwire_server.scheduling.operation import drops_accumulation, is_replayed_with


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
        work: What a recovery would have to do.
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
