"""The error for operations that fail for a reason a person can act on."""

from __future__ import annotations

from gradwire_losses.batch import BatchError
from gradwire_proto.v1 import training_pb2


class OperationError(Exception):
    """An operation or request failed; the run is unchanged.

    Attributes:
        message: A sentence for a person: what was wrong, where, what to do.
        field: The batch field or argument at fault; empty if none.
        row: The row of the caller's batch at fault; None if none.
        rule: The broken rule, in short.
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

    @classmethod
    def from_proto(cls, error: training_pb2.Error) -> OperationError:
        row = error.row if error.HasField("row") else None
        return cls(error.code, error.message, field=error.field, row=row, rule=error.rule)

    def to_proto(self) -> training_pb2.Error:
        error = training_pb2.Error(code=self.code, message=self.message, field=self.field, rule=self.rule)
        if self.row is not None:
            error.row = self.row
        return error


def invalid(message: str, argument: str) -> OperationError:
    """Make an INVALID_ARGUMENT error that names the argument."""
    return OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=argument)


class panics_as_errors:  # a context manager, which is cheaper as a class than as a generator
    """Turn the panic of a Rust library into an error of the request; it is no ``Exception``, and would end the engine.

    Raises:
        OperationError: INVALID_ARGUMENT for a panic in the body.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            message = f"a library gave up on the content of this request: {' '.join(str(error).split())[:200]}"
            raise OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message) from None


class GroupBroken(Exception):
    """The processes of an engine are out of step, or one of them is gone: it must be started again."""


class DamagedFile(Exception):
    """A file of this process does not hold what was written to it."""
