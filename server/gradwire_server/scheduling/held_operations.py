"""A run's share of the limits: operations without a result, and batch pieces that its engine holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import Usage, tokens_of
from gradwire_server.errors import ServiceError
from gradwire_server.journal.rows import JournalEntry
from gradwire_server.limits import Limits
from gradwire_server.operation_kinds import ends_parts, is_part
from gradwire_server.scheduling.operation import QueuedOperation


class HeldOperations:
    """Count of a run's operations without a result, and of parts of its next batch; the checks of their limits.

    Args:
        usage: The usage of the run's key; shared by its runs.

    Attributes:
        operations: Number of the run's operations without a result.
        bytes: Bytes of their payloads.
    """

    def __init__(self, limits: Limits, usage: Usage) -> None:
        self._limits, self._usage = limits, usage
        self.operations = self.bytes = 0
        self._parts: dict[int, int] = {}  # number -> bytes

    def add(self, operation: QueuedOperation) -> None:
        """Count an operation without a result."""
        self._count(1, operation.header.payload_bytes)
        if is_part(operation.header.operation):
            self._hold(operation.seq, operation.header.payload_bytes)

    def remove(self, operation: QueuedOperation, status: pb.Status.ValueType = pb.STATUS_UNSPECIFIED) -> None:
        """Stop counting an operation that has a result with this status, or is dropped.

        A part of a batch is counted until the engine does not hold it any more.
        """
        self._count(-1, -operation.header.payload_bytes)
        ended = operation.header.operation
        if is_part(ended) and status != pb.STATUS_SUCCEEDED:
            self._usage.part_bytes -= self._parts.pop(operation.seq, 0)
        if status and ends_parts(ended, status):
            self.drop_parts(operation.seq)

    def restored(self, part_bytes: int, entries: Sequence[JournalEntry]) -> None:
        """Count the parts that an engine holds of a run that was brought back to it.

        Args:
            part_bytes: Bytes of those in the checkpoint from which it started.
            entries: The operations after it that have a result.
        """
        self._hold(0, part_bytes)
        for entry in entries:
            operation, status = entry.header.operation, entry.status
            if is_part(operation) and status == pb.STATUS_SUCCEEDED:
                self._hold(entry.header.seq, entry.header.payload_bytes)
            elif status and ends_parts(operation, status):
                self.drop_parts(entry.header.seq)

    def _hold(self, seq: int, size: int) -> None:
        self._usage.part_bytes += size - self._parts.get(seq, 0)
        self._parts[seq] = size

    def drop_parts(self, before: int) -> None:
        """Stop counting the parts of a batch with numbers below this one."""
        for seq in [seq for seq in self._parts if seq < before]:
            self._usage.part_bytes -= self._parts.pop(seq)

    def _count(self, operations: int, size: int) -> None:
        self.operations += operations
        self.bytes += size
        self._usage.operations += operations
        self._usage.bytes += size

    def check(self, operation: QueuedOperation, next_seq: int, waiting: Collection[QueuedOperation]) -> None:
        """Check that the run may take another operation.

        Args:
            next_seq: The next number of the run.
            waiting: Operations that wait for that number. The operation that has it is taken whatever they hold.

        Raises:
            ServiceError: SEQ_GAP for a number too far ahead; LIMIT_EXCEEDED.
        """
        seq, size, limits = operation.seq, operation.header.payload_bytes, self._limits
        if seq >= next_seq + limits.max_window:
            raise ServiceError(
                pb.ERROR_CODE_SEQ_GAP,
                f"operation {seq} is too far ahead: {next_seq} is expected next, and at most {limits.max_window}"
                " numbers wait (--limit max_window=N); submit the missing ones first",
            )
        closes_gap = seq == next_seq and bool(waiting)
        if not closes_gap:
            self._check_queue(size)
        if is_part(operation.header.operation):
            self._check_parts(size)
        if seq > next_seq:
            self._check_window(next_seq, sum(each.header.payload_bytes for each in waiting), size)
        if not closes_gap:
            self._usage.check(size, tokens_of(operation.header.operation, operation.header.tensors, operation.pixels))

    def _check_queue(self, size: int) -> None:
        limits = self._limits
        if self.operations >= limits.max_queued_operations:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"the run has {limits.max_queued_operations} operations queued (--limit max_queued_operations=N); await"
                " some results, then submit this one again",
            )
        if self.bytes + size > limits.max_queued_bytes and self.bytes:  # an empty queue takes one of any size
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"the run's queued operations hold {self.bytes} bytes, and this one would pass"
                f" {limits.max_queued_bytes} (--limit max_queued_bytes=N); await some results, then"
                " submit this one again",
            )

    def _check_parts(self, size: int) -> None:
        own, of_key, limits = sum(self._parts.values()), self._usage.part_bytes, self._limits
        for whose, held, name in (("run", own, "max_part_bytes"), ("key", of_key, "key_part_bytes")):
            if held + size > (most := getattr(limits, name)):
                raise ServiceError(
                    pb.ERROR_CODE_LIMIT_EXCEEDED,
                    f"parts of batches that wait for their last one hold {held} bytes of this {whose}, and this one"
                    f" would pass {most} (--limit {name}=N); send the last part, or zero_grad",
                    rule=f"{name} = {most}",
                )

    def _check_window(self, next_seq: int, waiting_bytes: int, size: int) -> None:
        limits = self._limits
        if waiting_bytes and waiting_bytes + size > limits.max_window_bytes:  # the first one may have any size
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"{waiting_bytes} bytes wait for operation {next_seq}, and this one would pass"
                f" {limits.max_window_bytes} (--limit max_window_bytes=N); submit the missing one, then this one again",
                rule=f"max_window_bytes = {limits.max_window_bytes}",
            )
