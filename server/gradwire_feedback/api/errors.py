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

from gradwire_feedback.api.schemas import ErrorField, Problem
from gradwire_feedback.store.problems import ProblemError

log = logging.getLogger(__name__)

SHOWN_ERRORS = 20

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
        found.append(ErrorField(field=".".join([*([place] if place else []), *path]) or "body", message=error["msg"]))
    return found


def sentence(errors: Sequence[ErrorField]) -> str:
    return "; ".join(f"{each.field}: {each.message}" for each in errors)


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
        answer = problem(error.status_code, str(error.detail))
        answer.headers.update(error.headers or {})
        return answer
