"""What a result changes in its run's row."""

from __future__ import annotations

from dataclasses import replace

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.rows import RunMarks
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.operation_kinds import loss_result, step_result
from gradwire_server.scheduling import abort_rule
from gradwire_server.scheduling.operation import QueuedOperation


def follow(record: RunRecord, operation: QueuedOperation, result: pb.OperationResult) -> RunMarks:
    """Apply a result to a run's record; return the values for its row. Called by the run's queue only."""
    loss = loss_result(result)
    abort_rule.follow(record, operation, result)
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
