"""Errors as `Problem` documents: a sentence, and the fields at fault."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import gradwire
import sqlalchemy as sa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradwire.rlhf import RewardModelConfig, TrainingConfig
from gradwire_http.browsers import BrowserGuard, body_refusal
from gradwire_http.request_headers import headers_of
from pydantic.alias_generators import to_camel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gradwire_feedback.api.schemas import ErrorField, Problem
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store.problems import ProblemError

log = logging.getLogger(__name__)

SHOWN_ERRORS = 20
SETTINGS = {"reward_model", "reward_model_config"} | {
    each.name for kind in (TrainingConfig, RewardModelConfig) for each in fields(kind)
}
SETTING = re.compile(rf"\b({'|'.join(sorted((name for name in SETTINGS if '_' in name), key=len, reverse=True))})\b")
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
    fields = []
    for error in errors[:SHOWN_ERRORS]:
        path = [str(part) for part in error["loc"] if part not in ("body", "path", "query", "header")]
        fields.append(
            ErrorField(
                field=".".join([*([place] if place else []), *path]) or "body",
                message=error["msg"].removeprefix("Value error, "),
            )
        )
    return fields


async def as_sent(request: Request, text: str) -> str:
    """Spell the settings' names in a text as the request does: in camelCase, or in snake_case where it has that."""
    try:
        body = await request.json()
    except (ValueError, RuntimeError):  # no JSON, or read as a stream
        body = None
    own = body if isinstance(body, dict) else {}
    rewards = own.get("rewardModelConfig", own.get("reward_model_config"))
    sent = {*own, *(rewards if isinstance(rewards, dict) else ())}
    return SETTING.sub(lambda found: found[0] if found[0] in sent else to_camel(found[0]), text)


async def problem_of(request: Request, status: int, error: Exception, field: str) -> JSONResponse:
    """Answer with an error, and with its field where that is a setting."""
    if not SETTINGS.issuperset(field.split(".")):
        return problem(status, str(error))
    detail = await as_sent(request, str(error))
    return problem(status, detail, [ErrorField(field=await as_sent(request, field), message=detail)])


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


class ForeignPages:
    """Wrap an application to refuse what browsers send on behalf of other sites' pages."""

    def __init__(self, app: ASGIApp, guard: BrowserGuard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope.get("headers", ()))
        refused = None
        if scope["type"] in ("http", "websocket"):
            refused = self.guard.refusal(scope.get("method", "GET"), headers)
            if refused is None and scope["path"].startswith("/api/"):  # the pages' own channel sends plain text
                refused = body_refusal(headers)
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused[1]})
        else:
            await problem(*refused)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Install handlers so that the application answers every error in this form."""

    @app.exception_handler(ProblemError)
    async def refused(request: Request, error: ProblemError) -> JSONResponse:
        return await problem_of(request, error.status, error, error.field)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        errors = fields_of(error.errors())
        return problem(422, sentence(errors), errors)

    @app.exception_handler(gradwire.InvalidRequestError)
    async def impossible(request: Request, error: gradwire.InvalidRequestError) -> JSONResponse:
        return await problem_of(request, 422, error, error.field)

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
