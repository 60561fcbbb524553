"""What a failed operation aborts.

After a failure, the operations up to and including the next one that takes an optimizer step are aborted, except one
whose writer had already seen the failure: it and those after it run. An aborted step ends the failure; a step that
fails by itself starts a new one.
"""

from __future__ import annotations

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.run_row import RunRecord
from gradwire_server.scheduling.operation import QueuedOperation, failed


def aborts(record: RunRecord, operation: QueuedOperation) -> bool:
    """Whether a failure that the operation's writer had not seen aborts it."""
    failure, header = record.failure_seq, operation.header
    return failure > header.failure_seen and failure not in header.expired_seen


def verdict(record: RunRecord, operation: QueuedOperation) -> pb.OperationResult | None:
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


def follow(record: RunRecord, operation: QueuedOperation, result: pb.OperationResult) -> None:
    """Begin or end the run's failure with an operation's result; called by the run's queue only."""
    if result.status != pb.STATUS_CANCELLED and not aborts(record, operation):
        record.failure_seq, record.failure = 0, ""
    if result.status == pb.STATUS_FAILED:
        if result.error.code != pb.ERROR_CODE_ABORTED_PREDECESSOR:
            record.failure_seq, record.failure = operation.seq, result.error.message
        elif operation.row.steps:
            record.failure_seq, record.failure = 0, ""
