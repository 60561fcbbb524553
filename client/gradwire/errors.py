"""The exceptions of gradwire: one class a cause, drawn as a tree.

::

    GradwireError
    ├── InvalidRequestError             what was asked is wrong; asking again gives the same answer
    │   ├── InvalidArgumentError            .field, .rule
    │   ├── InvalidBatchError               .field, .row, .rule
    │   ├── NotFoundError
    │   │   ├── UnknownLossError
    │   │   ├── UnknownModelError
    │   │   ├── UnknownRunError
    │   │   ├── UnknownCheckpointError
    │   │   └── UnknownOperationError
    │   ├── AlreadyExistsError
    │   ├── LimitExceededError
    │   ├── NothingToStepError
    │   └── UnsupportedError
    ├── AccessError                     who asked may not
    │   ├── UnauthenticatedError
    │   └── PermissionDeniedError
    ├── OperationError                  the operation was accepted, and failed; the run is as it was before it
    │   ├── AbortedPredecessorError         .cause_seq; __cause__ is the first failure
    │   ├── OperationCancelledError
    │   ├── AbandonedError
    │   ├── NonFiniteError
    │   ├── OutOfMemoryError
    │   ├── CheckpointCorruptError
    │   └── QuarantinedError
    ├── WriterError                     this client and the run disagree about who writes, or what was written
    │   ├── StaleEpochError
    │   ├── RunBusyError
    │   ├── SequenceReusedError
    │   ├── SequenceGapError
    │   ├── ResultReleasedError
    │   └── RewoundError
    ├── ServerError                     the server is at fault, or in no state to answer
    │   ├── InternalServerError             .request_id finds it in the server's log
    │   ├── EngineUnavailableError
    │   ├── PayloadCorruptError
    │   ├── ServerStartError                an embedded server did not start
    │   ├── ShuttingDownError
    │   └── StorageFullError
    ├── ConnectionLostError             the server could not be reached for as long as the client was told to try
    ├── ServiceClosedError              the service was closed on this side
    └── WouldDeadlockError              Future.result() on the thread that has to produce the result

Every exception of the server's is made by :func:`from_wire`, from the one map :data:`EXCEPTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from gradwire_proto.v1 import training_pb2 as pb

DETAILS_KEY = "gradwire-error-bin"


class GradwireError(Exception):
    """Root of the tree.

    Attributes:
        field: the batch field or argument to blame; empty where there is none.
        row: the row of the batch as the caller gave it, where one row is to blame.
        rule: the rule that was broken, in short, e.g. ``"0 <= id < 32000"``.
        seq: the operation's number in its run, where it has one.
        request_id: what finds the failure in the server's log.
    """

    def __init__(
        self, message: str, *, field: str = "", row: int | None = None, rule: str = "", request_id: str = ""
    ) -> None:
        super().__init__(message)
        self.field = field
        self.row = row
        self.rule = rule
        self.request_id = request_id
        self.seq: int | None = None


class InvalidRequestError(GradwireError):
    """What was asked is wrong; asking again gives the same answer."""


class InvalidArgumentError(InvalidRequestError):
    """An argument is missing, unknown, of the wrong type or out of range: see ``field`` and ``rule``."""


class InvalidBatchError(InvalidRequestError):
    """The batch breaks a rule: see ``field``, ``row`` and ``rule``."""


class NotFoundError(InvalidRequestError):
    """There is no such thing, or it is another key's: the two are not told apart."""


class UnknownLossError(NotFoundError):
    """No loss has this name; the message names those there are."""


class UnknownModelError(NotFoundError):
    """The server does not hold this model."""


class UnknownRunError(NotFoundError):
    """There is no run of this id."""


class UnknownCheckpointError(NotFoundError):
    """There is no checkpoint of this name."""


class UnknownOperationError(NotFoundError):
    """The run has no operation of this number."""


class AlreadyExistsError(InvalidRequestError):
    """The name is taken."""


class LimitExceededError(InvalidRequestError):
    """A limit of the server's; the message names it and the flag that moves it."""


class NothingToStepError(InvalidRequestError):
    """``optim_step`` with no gradient accumulated since the last one."""


class UnsupportedError(InvalidRequestError):
    """The run, or the server, lacks what the operation needs."""


class AccessError(GradwireError):
    """Who asked may not."""


class UnauthenticatedError(AccessError):
    """The API key is missing or wrong."""


class PermissionDeniedError(AccessError):
    """The API key does not allow this."""


class OperationError(GradwireError):
    """The operation was accepted, and failed; the run is as it was before it."""


class AbortedPredecessorError(OperationError):
    """An operation before this one, in the same accumulation, failed first; ``__cause__`` is its error.

    Attributes:
        cause_seq: the number of the operation that failed first; None where it was refused before it had one.
    """

    cause_seq: int | None = None


class OperationCancelledError(OperationError):
    """The operation was cancelled before it started."""


class AbandonedError(OperationError):
    """The client gave up its half of the operation."""


class NonFiniteError(OperationError):
    """A loss or a gradient was NaN or infinite; the weights are untouched."""


class OutOfMemoryError(OperationError):
    """The device has not enough memory, even for the smallest micro-batch."""


class CheckpointCorruptError(OperationError):
    """The checkpoint's files do not match their checksums."""


class QuarantinedError(OperationError):
    """The operation killed the engine twice and is not tried again."""


class WriterError(GradwireError):
    """This client and the run disagree about who writes, or about what was written."""


class StaleEpochError(WriterError):
    """Another writer took the run over; open it again to take it back."""


class RunBusyError(WriterError):
    """Another writer holds the run; open it with ``takeover=True`` to fence that one."""


class SequenceReusedError(WriterError):
    """The number of this operation was used for another one."""


class SequenceGapError(WriterError):
    """The operation's number is too far ahead of the next expected one."""


class ResultReleasedError(WriterError):
    """The result was acknowledged before, and is gone."""


class RewoundError(WriterError):
    """The run went back to a checkpoint; operations after it did not happen."""


class ServerError(GradwireError):
    """The server is at fault, or in no state to answer."""


class InternalServerError(ServerError):
    """A fault of the server; ``request_id`` finds it in its log."""


class EngineUnavailableError(ServerError):
    """The engine died or is starting."""


class PayloadCorruptError(ServerError):
    """The payload arrived with another digest than it was sent with."""


class ServerStartError(ServerError):
    """An embedded server did not start; the message ends with what it wrote to stderr."""


class ShuttingDownError(ServerError):
    """The server is shutting down."""


class StorageFullError(ServerError):
    """The server's disk is full."""


class ConnectionLostError(GradwireError):
    """The server could not be reached for as long as the client was told to try."""


class ServiceClosedError(GradwireError):
    """The service was closed on this side."""


class WouldDeadlockError(GradwireError):
    """``Future.result()`` was called on the event loop's own thread, which has to produce the result."""


EXCEPTIONS: Mapping[pb.ErrorCode.ValueType, type[GradwireError]] = {
    pb.ERROR_CODE_UNSPECIFIED: InternalServerError,
    pb.ERROR_CODE_INTERNAL: InternalServerError,
    pb.ERROR_CODE_INVALID_ARGUMENT: InvalidArgumentError,
    pb.ERROR_CODE_INVALID_BATCH: InvalidBatchError,
    pb.ERROR_CODE_UNKNOWN_LOSS: UnknownLossError,
    pb.ERROR_CODE_UNKNOWN_MODEL: UnknownModelError,
    pb.ERROR_CODE_UNKNOWN_RUN: UnknownRunError,
    pb.ERROR_CODE_UNKNOWN_CHECKPOINT: UnknownCheckpointError,
    pb.ERROR_CODE_UNKNOWN_OPERATION: UnknownOperationError,
    pb.ERROR_CODE_ALREADY_EXISTS: AlreadyExistsError,
    pb.ERROR_CODE_SEQ_REUSED: SequenceReusedError,
    pb.ERROR_CODE_SEQ_GAP: SequenceGapError,
    pb.ERROR_CODE_STALE_EPOCH: StaleEpochError,
    pb.ERROR_CODE_RUN_BUSY: RunBusyError,
    pb.ERROR_CODE_ABORTED_PREDECESSOR: AbortedPredecessorError,
    pb.ERROR_CODE_CANCELLED: OperationCancelledError,
    pb.ERROR_CODE_ABANDONED: AbandonedError,
    pb.ERROR_CODE_LIMIT_EXCEEDED: LimitExceededError,
    pb.ERROR_CODE_UNAUTHENTICATED: UnauthenticatedError,
    pb.ERROR_CODE_PERMISSION_DENIED: PermissionDeniedError,
    pb.ERROR_CODE_NON_FINITE: NonFiniteError,
    pb.ERROR_CODE_OUT_OF_MEMORY: OutOfMemoryError,
    pb.ERROR_CODE_ENGINE_UNAVAILABLE: EngineUnavailableError,
    pb.ERROR_CODE_QUARANTINED: QuarantinedError,
    pb.ERROR_CODE_STORAGE_FULL: StorageFullError,
    pb.ERROR_CODE_CHECKPOINT_CORRUPT: CheckpointCorruptError,
    pb.ERROR_CODE_PAYLOAD_CORRUPT: PayloadCorruptError,
    pb.ERROR_CODE_RESULT_RELEASED: ResultReleasedError,
    pb.ERROR_CODE_REWOUND: RewoundError,
    pb.ERROR_CODE_NOTHING_TO_STEP: NothingToStepError,
    pb.ERROR_CODE_UNSUPPORTED: UnsupportedError,
    pb.ERROR_CODE_SHUTTING_DOWN: ShuttingDownError,
}

# A gRPC status that came without details: from a proxy, from grpc itself, or from a server that is not ours.
STATUSES: Mapping[grpc.StatusCode, type[GradwireError]] = {
    grpc.StatusCode.UNAVAILABLE: ConnectionLostError,
    grpc.StatusCode.DEADLINE_EXCEEDED: ConnectionLostError,
    grpc.StatusCode.CANCELLED: ConnectionLostError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceededError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
}

RETRYABLE = (ConnectionLostError, EngineUnavailableError, ShuttingDownError)


def from_wire(error: pb.Error) -> GradwireError:
    """The exception for an error of the server's. A code newer than this client is an InternalServerError."""
    kind = EXCEPTIONS.get(error.code, InternalServerError)
    exception = kind(
        error.message or f"the server gave no message (code {error.code})",
        field=error.field,
        row=error.row if error.HasField("row") else None,
        rule=error.rule,
        request_id=error.request_id,
    )
    if isinstance(exception, AbortedPredecessorError):
        exception.cause_seq = error.cause_seq
    if error.request_id and isinstance(exception, ServerError):
        exception.add_note(f"request id: {error.request_id}")
    return exception


def from_rpc(error: grpc.aio.AioRpcError, address: str) -> GradwireError:
    """The exception for an RPC that failed: from the details it carries, else from its status."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return from_wire(pb.Error.FromString(value))
    status = error.code()
    kind = STATUSES.get(status, InternalServerError)
    details = error.details() or ""
    if "RST_STREAM" in details or details == "Internal error from Core":  # a write came too late to learn why
        kind = ConnectionLostError
    if kind is ConnectionLostError:
        return ConnectionLostError(f"no answer from {address}: {error.details() or status.name}")
    return kind(f"{address} answered {status.name}: {error.details()}")
