"""Errors of the use cases, each with its HTTP status."""

from __future__ import annotations

from typing import ClassVar


class ProblemError(Exception):
    """A request that cannot be carried out; the message is for its sender.

    Attributes:
        field: The field at fault; empty if none.
    """

    status: ClassVar[int] = 400

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class NotFoundError(ProblemError):
    status = 404


class ConflictError(ProblemError):
    status = 409


class UnprocessableError(ProblemError):
    status = 422


class TooLargeError(ProblemError):
    status = 413


class UnauthenticatedError(ProblemError):
    status = 401


class ForbiddenError(ProblemError):
    status = 403
