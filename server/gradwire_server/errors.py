"""The core's only error type: a code, a message for the caller, and the field and row at fault; each door maps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gradwire_proto.v1 import training_pb2 as pb

Code: TypeAlias = pb.ErrorCode.ValueType
ERROR_METADATA = "gradwire-error-bin"
"""Trailing metadata of gRPC in which the whole error travels, serialized."""


class NotNow(SystemExit):
    """A start that failed by what may pass by itself: the same command may succeed later. Its code is the message."""


class ServiceError(Exception):
    """An error for the caller, whose message may leave the server.

    Attributes:
        error: The error as a message: code, message, field, row, rule and the failed operation that caused it.
    """

    def __init__(
        self, code: Code, message: str, *, field: str = "", row: int | None = None, rule: str = "", cause_seq: int = 0
    ) -> None:
        super().__init__(message)
        self.error = pb.Error(code=code, message=message, field=field, row=row, rule=rule, cause_seq=cause_seq)

    @classmethod
    def of(cls, error: pb.Error) -> ServiceError:
        """An exception that carries an existing error unchanged."""
        raised = cls(error.code, error.message)
        raised.error.CopyFrom(error)
        return raised

    @property
    def code(self) -> Code:
        """The error's code."""
        return self.error.code


def invalid(message: str, field: str) -> ServiceError:
    """INVALID_ARGUMENT for a field."""
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field=field)


def unknown_run(run_id: str) -> ServiceError:
    """UNKNOWN_RUN, also for a run that the caller may not read, so that its existence stays hidden."""
    return ServiceError(pb.ERROR_CODE_UNKNOWN_RUN, f"there is no run {run_id[:100]!r}", field="run_id")


def unknown_checkpoint(path: str, there: Sequence[str] = ()) -> ServiceError:
    """UNKNOWN_CHECKPOINT, also for a checkpoint that the caller may not read.

    Args:
        there: Names of the run's checkpoints, the newest last, of a run that the caller may read.
    """
    more = f" and {len(there) - 5} more" if len(there) > 5 else ""
    instead = f"; the run has {', '.join(there[-5:])}{more}" if there else ""
    message = f"there is no checkpoint {path[:200]!r}{instead}"
    return ServiceError(pb.ERROR_CODE_UNKNOWN_CHECKPOINT, message, field="checkpoint")


def unknown_upload(upload_id: str) -> ServiceError:
    """UNKNOWN_CHECKPOINT, also for an upload of another key."""
    return ServiceError(pb.ERROR_CODE_UNKNOWN_CHECKPOINT, f"there is no upload {upload_id[:100]!r}", field="upload")


def unknown_job(job_id: str) -> ServiceError:
    """UNKNOWN_JOB, also for a job of another key."""
    return ServiceError(pb.ERROR_CODE_UNKNOWN_JOB, f"there is no job {job_id[:100]!r}", field="job_id")


def unknown_session(session_id: str) -> ServiceError:
    """UNKNOWN_SESSION, also for a session of another key."""
    message = f"there is no rollout session {session_id[:100]!r}"
    return ServiceError(pb.ERROR_CODE_UNKNOWN_SESSION, message, field="session_id")


def key_reused(made: str, content: str, field: str = "idempotency_key") -> ServiceError:
    """ALREADY_EXISTS for an idempotency key that has made something of another content.

    Args:
        made: The thing that it has made, such as "the run run-abc".
        content: The part that differs: "settings" or "content".
    """
    message = f"this idempotency key made {made} with other {content}; a new one takes a new key"
    return ServiceError(pb.ERROR_CODE_ALREADY_EXISTS, message, field=field)


def unknown_file(file_id: str, field: str = "file_id") -> ServiceError:
    """UNKNOWN_FILE, also for a file of another key."""
    return ServiceError(pb.ERROR_CODE_UNKNOWN_FILE, f"there is no file {file_id[:100]!r}", field=field)


def shutting_down() -> ServiceError:
    """SHUTTING_DOWN."""
    return ServiceError(pb.ERROR_CODE_SHUTTING_DOWN, "the server is shutting down; connect again once it is back")


def parked_error(run_id: str, reason: pb.Error) -> ServiceError:
    """RUN_PARKED for those who submit to a parked run or wait for its results."""
    return ServiceError(
        pb.ERROR_CODE_RUN_PARKED,
        f"the run {run_id} is parked, and its accepted operations wait: {reason.message}. It goes on by itself once the"
        " cause is gone; its owner can cancel what waits with discard_pending()",
        field=reason.field,
        rule=reason.rule,
    )


def limit_exceeded(what: str, name: str, limit: int, field: str) -> ServiceError:
    """LIMIT_EXCEEDED for a request that asks for more than a limit of the server allows.

    Args:
        what: The requested amount, as the start of the message.
        name: Name of the limit, as in ``--limit NAME=N``.
    """
    message = f"{what}; {limit} at most (--limit {name}=N)"
    return ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field=field, rule=f"{name} = {limit}")


def check_length(text: str, name: str, limit: int, field: str) -> None:
    """Check the length of a text against a limit in characters.

    Raises:
        ServiceError: LIMIT_EXCEEDED.
    """
    if len(text) > limit:
        raise limit_exceeded(f"{field} has {len(text)} characters", name, limit, field)
