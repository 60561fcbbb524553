"""The one error by which an operation fails for a reason that a person can act on."""

from __future__ import annotations

from gradwire_losses.batch import BatchError
from gradwire_proto.v1 import training_pb2


class OperationError(Exception):
    """An operation or a request failed; the run is as it was before it.

    Attributes:
        code: an ``ErrorCode`` of the wire.
        message: a sentence for a person: what was wrong, where, what to do.
        field: the batch field or argument to blame, where there is one.
        row: the row of the caller's batch, where one is to blame.
        rule: the rule that was broken, in short.
    """

    def __init__(
        self,
        code: training_pb2.ErrorCode.ValueType,
        message: str,
        *,
        field: str = "",
        row: int | None = None,
        rule: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.row = row
        self.rule = rule

    @classmethod
    def from_batch_error(cls, error: BatchError) -> OperationError:
        return cls(training_pb2.ERROR_CODE_INVALID_BATCH, str(error), field=error.field, row=error.row, rule=error.rule)

    def to_proto(self) -> training_pb2.Error:
        error = training_pb2.Error(code=self.code, message=self.message, field=self.field, rule=self.rule)
        if self.row is not None:
            error.row = self.row
        return error


def invalid(message: str, argument: str) -> OperationError:
    """INVALID_ARGUMENT, of this argument."""
    return OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=argument)
