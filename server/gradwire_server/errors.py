"""The one error of the core: a code, a sentence for the caller, and where the fault is. Doors map it once."""

from __future__ import annotations

from typing import TypeAlias

from gradwire_proto.v1 import training_pb2 as pb

Code: TypeAlias = pb.ErrorCode.ValueType


class ServiceError(Exception):
    """A refusal that may travel: its message is for the caller to read."""

    def __init__(
        self, code: Code, message: str, *, field: str = "", row: int | None = None, rule: str = "", cause_seq: int = 0
    ) -> None:
        super().__init__(message)
        self.error = pb.Error(code=code, message=message, field=field, row=row, rule=rule, cause_seq=cause_seq)

    @classmethod
    def of(cls, error: pb.Error) -> ServiceError:
        """The refusal that carries this error as it is."""
        raised = cls(error.code, error.message)
        raised.error.CopyFrom(error)
        return raised

    @property
    def code(self) -> Code:
        return self.error.code


def unknown_run(run_id: str) -> ServiceError:
    """Also for another's run: the two are not told apart."""
    return ServiceError(pb.ERROR_CODE_UNKNOWN_RUN, f"there is no run {run_id[:100]!r}", field="run_id")


def unknown_checkpoint(path: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_UNKNOWN_CHECKPOINT, f"there is no checkpoint {path[:200]!r}", field="checkpoint")


def shutting_down() -> ServiceError:
    return ServiceError(pb.ERROR_CODE_SHUTTING_DOWN, "the server is shutting down; connect again once it is back")


def limit_exceeded(what: str, name: str, limit: int, field: str) -> ServiceError:
    """A request that asks for more than a limit of the server allows.

    Args:
        what: how much was asked for, as the beginning of the sentence.
        name: the limit's name, as ``--limit NAME=N`` takes it.
    """
    message = f"{what}; {limit} at most (--limit {name}=N)"
    return ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field=field, rule=f"{name} = {limit}")


def check_length(text: str, name: str, limit: int, field: str) -> None:
    """
    Raises:
        ServiceError: LIMIT_EXCEEDED for a text with more characters than a limit allows.
    """
    if len(text) > limit:
        raise limit_exceeded(f"{field} has {len(text)} characters", name, limit, field)
