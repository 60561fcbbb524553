"""Errors as `Problem` documents: a sentence, and the fields at fault."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import gradwire
import sqlalchemy as sa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gradwire_feedback.api.schemas import ErrorField, Problem
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store.problems import ProblemError

log = logging.getLogger(__name__)

SHOWN_ERRORS = 20
TOO_LARGE = f"the body is larger than {LIMITS.body_bytes >> 20} MiB: send it in parts"

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body does not match its content type."},
    401: {"model": Problem, "description": "A valid key is missing."},
    403: {"model": Problem, "description": "The key's role does not allow it."},
    404: {"model": Problem, "description": "The object does not exist."},
    409: {"model": Problem, "description": "The request conflicts with the current state."},
    413: {"model": Problem, "description": "The body is too large."},
    415: {"model": Problem, "description": "The body's type is not supported."},
    422: {"model": Problem, "description": "A field is wrong."},
    503: {"model": Problem, "description": "The training server or the database is unavailable."},
}


def problem(status: int, detail: str, errors: Sequence[ErrorField] = ()) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    body = Problem(detail=detail, errors=list(errors)).model_dump(mode="json", by_alias=True)
    return JSONResponse(body, status_code=status, headers=headers)


def fields_of(errors: Sequence[Any], place: str = "") -> list[ErrorField]:
    """List the errors of a pydantic validation by field, at most twenty."""
    found = []
    for error in errors[:SHOWN_ERRORS]:
        path = [str(part) for part in error["loc"] if part not in ("body", "path", "query", "header")]
        found.append(
            ErrorField(
                field=".".join([*([place] if place else []), *path]) or "body",
                message=error["msg"].removeprefix("Value error, "),
            )
        )
    return found


def sentence(errors: Sequence[ErrorField]) -> str:
    return "; ".join(f"{each.field}: {each.message}" for each in errors)


class BodyLimit:
    """Wrap an application to refuse a body by its announced length, which FastAPI does in plain text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope.get("headers", ())).get(b"content-length", b"")
        too_large = length.isdigit() and int(length) > LIMITS.body_bytes
        await (problem(413, TOO_LARGE) if too_large else self.app)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Install handlers so that the application answers every error in this form."""

    @app.exception_handler(ProblemError)
    async def refused(_request: Request, error: ProblemError) -> JSONResponse:
        return problem(error.status, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        errors = fields_of(error.errors())
        return problem(422, sentence(errors), errors)

    @app.exception_handler(gradwire.InvalidRequestError)
    async def impossible(_request: Request, error: gradwire.InvalidRequestError) -> JSONResponse:
        return problem(422, str(error))

    @app.exception_handler(gradwire.GradwireError)
    async def away(_request: Request, error: gradwire.GradwireError) -> JSONResponse:
        log.error("the training server failed: %s", error)
        return problem(503, f"the training server failed: {error}")

    @app.exception_handler(sa.exc.OperationalError)
    @app.exception_handler(sa.exc.TimeoutError)
    async def busy(_request: Request, error: sa.exc.SQLAlchemyError) -> JSONResponse:
        log.error("the database failed: %s", error)
        return problem(
            503, "the database is busy or unavailable: send the request again, with an Idempotency-Key if you can"
        )

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> JSONResponse:
        answer = problem(error.status_code, TOO_LARGE if error.status_code == 413 else str(error.detail))
        answer.headers.update(error.headers or {})
        return answer
