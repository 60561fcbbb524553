"""The exceptions of gradwire, one class per cause.

::

    GradwireError
    ├── InvalidRequestError             the request is wrong; a retry fails the same way
    │   ├── InvalidArgumentError            .field, .rule
    │   ├── InvalidBatchError               .field, .row, .rule
    │   ├── NotFoundError
    │   │   ├── UnknownLossError
    │   │   ├── UnknownModelError
    │   │   ├── UnknownRunError
    │   │   ├── UnknownCheckpointError
    │   │   ├── UnknownFileError
    │   │   ├── UnknownSessionError
    │   │   ├── UnknownJobError
    │   │   └── UnknownOperationError
    │   ├── AlreadyExistsError
    │   ├── LimitExceededError
    │   ├── NothingToStepError
    │   └── UnsupportedError
    ├── AccessError                     the caller is not allowed to do this
    │   ├── UnauthenticatedError
    │   └── PermissionDeniedError
    ├── OperationError                  an accepted operation failed; the run is unchanged by it
    │   ├── AbortedPredecessorError         .cause_seq; __cause__ is the first failure
    │   ├── OperationCancelledError
    │   ├── DeadlineExceededError
    │   ├── AbandonedError
    │   ├── NonFiniteError
    │   ├── OutOfMemoryError
    │   ├── CheckpointCorruptError
    │   └── QuarantinedError
    ├── WriterError                     conflict about who writes to the run, or about what was written
    │   ├── StaleEpochError
    │   ├── RunBusyError
    │   ├── SequenceReusedError
    │   ├── SequenceGapError
    │   ├── ResultReleasedError
    │   └── RewoundError
    ├── ServerError                     a fault of the server, or a server that cannot answer now
    │   ├── InternalServerError             .request_id finds it in the server's log
    │   ├── EngineUnavailableError
    │   ├── PayloadCorruptError
    │   ├── ServerStartError                an embedded server did not start
    │   ├── RunParkedError
    │   ├── ShuttingDownError
    │   └── StorageFullError
    ├── ConnectionLostError             the server stayed unreachable past the timeout
    ├── ServiceClosedError              this client closed the service
    └── WouldDeadlockError              Future.result() on the thread that must produce the result

:func:`from_wire` turns a server error into an exception, through the map :data:`EXCEPTIONS`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import grpc
from gradwire_proto.v1 import training_pb2 as pb

DETAILS_KEY = "gradwire-error-bin"


class GradwireError(Exception):
    """Root of the exception tree.

    Attributes:
        field: The batch field or argument at fault; empty if none.
        row: The row of the batch, as the caller passed it, if one row is at fault.
        rule: The broken rule in short form, e.g. ``"0 <= id < 32000"``.
        seq: The operation's number in its run, if it has one.
        request_id: Identifies the failure in the server's log.
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
    """The request is wrong; a retry fails the same way."""


class InvalidArgumentError(InvalidRequestError):
    """An argument is missing, unknown, of the wrong type or out of range: see ``field`` and ``rule``."""


class InvalidBatchError(InvalidRequestError):
    """The batch breaks a rule: see ``field``, ``row`` and ``rule``."""


class NotFoundError(InvalidRequestError):
    """The object does not exist or belongs to another key; the server does not tell which."""


class UnknownLossError(NotFoundError):
    """No loss has this name; the message lists the available losses."""


class UnknownModelError(NotFoundError):
    """The server does not hold this model."""


class UnknownRunError(NotFoundError):
    """No run has this id."""


class UnknownCheckpointError(NotFoundError):
    """No checkpoint has this name."""


class UnknownOperationError(NotFoundError):
    """The run has no operation of this number."""


class UnknownJobError(NotFoundError):
    """No job has this id."""


class UnknownFileError(NotFoundError):
    """No file has this id, or no recording this number."""


class UnknownSessionError(NotFoundError):
    """No rollout session has this id."""


class AlreadyExistsError(InvalidRequestError):
    """The name is already in use."""


class LimitExceededError(InvalidRequestError):
    """The request exceeds a limit of the server; the message names the limit and the flag that changes it."""


class NothingToStepError(InvalidRequestError):
    """``optim_step`` was called with no gradient accumulated since the last step."""


class UnsupportedError(InvalidRequestError):
    """The run or the server does not support the operation."""


class AccessError(GradwireError):
    """The caller is not allowed to do this."""


class UnauthenticatedError(AccessError):
    """The API key is missing or wrong."""


class PermissionDeniedError(AccessError):
    """The API key does not allow this."""


class OperationError(GradwireError):
    """An accepted operation failed; the run is as it was before the operation."""


class AbortedPredecessorError(OperationError):
    """An earlier operation of the same accumulation failed; ``__cause__`` is its error.

    Attributes:
        cause_seq: Number of the operation that failed first; None if it was refused before it got a number.
    """

    cause_seq: int | None = None


class OperationCancelledError(OperationError):
    """The operation was cancelled before it was done; the run is as if it had not been submitted."""


class DeadlineExceededError(OperationError):
    """The operation had no result when its ``timeout`` was over; a running one was stopped."""


class AbandonedError(OperationError):
    """The client withdrew its half of the operation."""


class NonFiniteError(OperationError):
    """A loss or a gradient was NaN or infinite; the weights are untouched."""


class OutOfMemoryError(OperationError):
    """The device has too little memory, even for the smallest micro-batch."""


class CheckpointCorruptError(OperationError):
    """The files of a checkpoint, or a file of training data, do not match their checksums."""


class QuarantinedError(OperationError):
    """The operation crashed the engine twice and is not tried again."""


class WriterError(GradwireError):
    """This client and the run disagree about who writes, or about what was written."""


class StaleEpochError(WriterError):
    """Another writer took over the run; reopen the run to take it back."""


class RunBusyError(WriterError):
    """Another writer holds the run; open it with ``takeover=True`` to replace that writer."""


class SequenceReusedError(WriterError):
    """The operation's number was already used for another operation."""


class SequenceGapError(WriterError):
    """The operation's number is too far ahead of the next expected one."""


class ResultReleasedError(WriterError):
    """The result was acknowledged earlier and has been deleted."""


class RewoundError(WriterError):
    """The run was restored to a checkpoint; the operations after it are discarded."""


class ServerError(GradwireError):
    """A fault of the server, or a server that cannot answer now."""


class InternalServerError(ServerError):
    """An internal fault of the server; search its log for ``request_id``."""


class EngineUnavailableError(ServerError):
    """The engine died or is starting."""


class PayloadCorruptError(ServerError):
    """The payload's digest differs between sender and receiver."""


class ServerStartError(ServerError):
    """An embedded server did not start; the message ends with the server's stderr."""


class RunParkedError(ServerError):
    """The run cannot go on for now, and its accepted operations wait; the message says why and what to do."""


class ShuttingDownError(ServerError):
    """The server is shutting down."""


class StorageFullError(ServerError):
    """The server's disk is full."""


class ConnectionLostError(GradwireError):
    """The server stayed unreachable for longer than the client's timeout."""


class ServiceClosedError(GradwireError):
    """The service was closed by this client."""


class WouldDeadlockError(GradwireError):
    """``Future.result()`` was called on the thread of the event loop that must produce the result."""


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
    pb.ERROR_CODE_RUN_PARKED: RunParkedError,
    pb.ERROR_CODE_DEADLINE_EXCEEDED: DeadlineExceededError,
    pb.ERROR_CODE_UNKNOWN_JOB: UnknownJobError,
    pb.ERROR_CODE_UNKNOWN_FILE: UnknownFileError,
    pb.ERROR_CODE_UNKNOWN_SESSION: UnknownSessionError,
}

# A gRPC status without details comes from a proxy, from grpc itself, or from another kind of server.
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

RETRYABLE = (ConnectionLostError, EngineUnavailableError, ShuttingDownError, StorageFullError)
"""Temporary errors: a call that is safe to repeat is repeated for as long as the connection's patience allows."""


REASONS = {
    "Connection refused": "nothing listens there; start the server, or write the port that it says it listens on",
    "Domain name not found": "no host has this name",
    "lookup error": "the name of the host is not found",
    "Expected SETTINGS frame": "what answers does not speak gRPC; write the port that the server says it listens on",
}
"""Words of gRPC's details -> what they mean."""


def from_wire(error: pb.Error) -> GradwireError:
    """Convert a server error to its exception; a code unknown to this client becomes InternalServerError."""
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
    """Convert a failed RPC to its exception, from its details if it has any, else from its status."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return from_wire(pb.Error.FromString(value))
    status = error.code()
    kind = STATUSES.get(status, InternalServerError)
    details = error.details() or ""
    # grpc reports this when a write fails before the reason is known.
    if "RST_STREAM" in details or details == "Internal error from Core":
        kind = ConnectionLostError
    if "WRONG_VERSION_NUMBER" in details:
        return InvalidArgumentError(
            f"{address} does not speak TLS: leave out https:// and certificates, or start the server with --tls-cert",
            field="address",
        )
    if "http1.x server" in details:
        return InvalidArgumentError(
            f"{address} does not speak gRPC: write the address that the server says it listens on; its port for HTTP "
            "is for the clients of OpenAI and Tinker",
            field="address",
        )
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        why = details.partition("CERTIFICATE_VERIFY_FAILED: ")[2].partition(":")[0] or "it names another host"
        return InvalidArgumentError(
            f"the certificate of {address} is not trusted ({why}): give the PEM file of who signed it as ca_cert, and "
            "the host name that it names as address",
            field="ca_cert",
        )  # fmt: skip
    if kind is ConnectionLostError:
        hint = "; a server with TLS has https:// in its address" if "Socket closed" in details else ""
        reason = details.rpartition("last error: ")[2].partition(": ")[2] or details or status.name
        reason = next((meaning for words, meaning in REASONS.items() if words in details), f"{reason}{hint}")
        return ConnectionLostError(f"no answer from {address}: {reason}")
    return kind(f"{address} answered {status.name}: {error.details()}")


def type_of(value: object) -> str:
    """Name a value's type with its article, for messages: ``"an int"``."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' or name.startswith('nd') else 'a'} {name}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest the nearest known name, for messages: ``" (did you mean 'dpo'?)"``; "" if none is near."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
