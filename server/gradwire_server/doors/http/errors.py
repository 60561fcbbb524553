"""Map from the core's errors to HTTP statuses, and the handlers that give a protocol's errors its form.

A status tells a client's library whether to try again: 429 for what fits later, 503 while the server or its engine is
away. 409 and 402 are not used: libraries retry or wait on them, although nothing changes by waiting.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gradwire_server.doors.http.protocol import ErrorBody
from gradwire_server.errors import Code, ServiceError

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 4000
MAX_FIELD_CHARS = 200
_CORE_NAME = re.compile(r"\brun-[a-z2-7]{16}(?:/[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?)?")
LOGGED = "gradwire.logged"
"""Key of a scope whose unforeseen error was logged and answered."""
CONFLICT = 409
"""Status of an idempotency key that has made something else. Most clients repeat the request unless told not to;
Tinker's always repeats it, so its numbers that are used again are 422."""
HTTP_STATUS: dict[Code, int] = {
    pb.ERROR_CODE_UNSPECIFIED: 500,
    pb.ERROR_CODE_INTERNAL: 500,
    pb.ERROR_CODE_INVALID_ARGUMENT: 400,
    pb.ERROR_CODE_INVALID_BATCH: 400,
    pb.ERROR_CODE_UNKNOWN_LOSS: 400,
    pb.ERROR_CODE_UNKNOWN_MODEL: 404,
    pb.ERROR_CODE_UNKNOWN_RUN: 404,
    pb.ERROR_CODE_UNKNOWN_CHECKPOINT: 404,
    pb.ERROR_CODE_UNKNOWN_OPERATION: 404,
    pb.ERROR_CODE_ALREADY_EXISTS: CONFLICT,
    pb.ERROR_CODE_SEQ_REUSED: 422,
    pb.ERROR_CODE_SEQ_GAP: 429,
    pb.ERROR_CODE_STALE_EPOCH: 422,
    pb.ERROR_CODE_RUN_BUSY: 422,
    pb.ERROR_CODE_ABORTED_PREDECESSOR: 422,
    pb.ERROR_CODE_CANCELLED: 422,
    pb.ERROR_CODE_ABANDONED: 422,
    pb.ERROR_CODE_LIMIT_EXCEEDED: 400,
    pb.ERROR_CODE_UNAUTHENTICATED: 401,
    pb.ERROR_CODE_PERMISSION_DENIED: 403,
    pb.ERROR_CODE_NON_FINITE: 422,
    pb.ERROR_CODE_OUT_OF_MEMORY: 503,
    pb.ERROR_CODE_ENGINE_UNAVAILABLE: 503,
    pb.ERROR_CODE_QUARANTINED: 422,
    pb.ERROR_CODE_STORAGE_FULL: 503,
    pb.ERROR_CODE_CHECKPOINT_CORRUPT: 422,
    pb.ERROR_CODE_PAYLOAD_CORRUPT: 400,
    pb.ERROR_CODE_RESULT_RELEASED: 404,
    pb.ERROR_CODE_REWOUND: 422,
    pb.ERROR_CODE_NOTHING_TO_STEP: 422,
    pb.ERROR_CODE_UNSUPPORTED: 400,
    pb.ERROR_CODE_SHUTTING_DOWN: 503,
    pb.ERROR_CODE_RUN_PARKED: 503,
    pb.ERROR_CODE_DEADLINE_EXCEEDED: 504,
    pb.ERROR_CODE_UNKNOWN_JOB: 404,
    pb.ERROR_CODE_UNKNOWN_FILE: 404,
    pb.ERROR_CODE_UNKNOWN_SESSION: 404,
}
PASSING = (
    "queued_operations", "queued_bytes", "tokens_per_minute", "max_incoming_bytes", "max_queued_operations",
    "max_queued_bytes", "max_window", "max_window_bytes", "key_waiting_calls", "key_streams", "samples_in_progress",
    "sample_tokens_per_minute", "samples_waiting",
)  # fmt: skip
"""Limits under which the same request fits later: 429, not 400."""


def in_public_names(text: str, public: Callable[[str], str]) -> str:
    """A text with the core's names of runs and checkpoints as a protocol's clients know them.

    Args:
        public: ``RUN_ID`` or ``RUN_ID/CHECKPOINT`` -> the protocol's name.
    """
    return _CORE_NAME.sub(lambda found: public(found[0]), text)


def status_of(error: pb.Error) -> int:
    """The HTTP status of an error."""
    if error.code == pb.ERROR_CODE_LIMIT_EXCEEDED and error.rule.partition(" ")[0] in PASSING:
        return 429
    return HTTP_STATUS.get(error.code, 500)


def _retry_after_s(status: int, error: pb.Error) -> int | None:
    """Seconds after which the same request may fit; None where a client knows better, or where it never will."""
    if status == 429 and error.code == pb.ERROR_CODE_LIMIT_EXCEEDED:
        return 15 if error.rule.partition(" ")[0].endswith(("tokens_per_minute", "samples_waiting")) else 1
    return 5 if status == 503 else None


def error_response(error: pb.Error, body: ErrorBody, status: int | None = None) -> JSONResponse:
    """The response for an error; ``status`` replaces that of its code."""
    body_error = pb.Error()
    body_error.CopyFrom(error)
    body_error.request_id = error.request_id or secrets.token_hex(8)
    if len(body_error.message) > MAX_MESSAGE_CHARS:
        body_error.message = body_error.message[:MAX_MESSAGE_CHARS] + "…"
    status = status or status_of(body_error)
    log.info("request %s refused with %d: %s", body_error.request_id, status, pb.ErrorCode.Name(body_error.code))
    headers = {"X-Request-Id": body_error.request_id}
    if status == CONFLICT:
        headers["X-Should-Retry"] = "false"
    if (retry_after_s := _retry_after_s(status, body_error)) is not None:
        headers["Retry-After"] = str(retry_after_s)
    return JSONResponse(dict(body(status, body_error)), status, headers)


def internal_error(error: Exception, path: str) -> pb.Error:
    """Log an unforeseen exception under a request id; returns the error that names the id."""
    request_id = secrets.token_hex(8)
    log.error("request %s of %s failed", request_id, path, exc_info=error, extra={"request_id": request_id})
    message = f"the server made a mistake; its log has it as request {request_id}"
    return pb.Error(code=pb.ERROR_CODE_INTERNAL, message=message, request_id=request_id)


def body_problem(problem: Mapping[str, Any]) -> str:
    """Describe a fault of a body as a whole, from pydantic's report; empty if the fault is in one of its fields."""
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']}, at character {problem['loc'][-1]}"
    if len(problem["loc"]) > 1:
        return ""
    return "the body is not a JSON object; send one, with Content-Type: application/json"


def invalid_body(error: RequestValidationError) -> pb.Error:
    """INVALID_ARGUMENT for a body that is not what its route takes; names the first wrong field."""
    first = error.errors()[0]
    problem = body_problem(first)
    field = "" if problem else ".".join(str(part) for part in first["loc"][1:])[:MAX_FIELD_CHARS]
    text = problem or f"{field}: {str(first['msg'])[:500]}"
    return pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=text, field=field)


def _unreadable(cause: BaseException) -> str:
    """Why a body could not be parsed, where the parser does not say it of a place."""
    if isinstance(cause, RecursionError):
        return "the body is not JSON that this server reads: it is nested too deep"
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not JSON in UTF-8: {cause.reason} at byte {cause.start}"
    return f"the body is not JSON that this server reads: {str(cause)[:200]}"


def application(title: str, answer: type[BaseModel], body: ErrorBody) -> FastAPI:
    """An application without routes that answers every error in a protocol's form.

    Args:
        answer: The form, for the OpenAPI document at ``openapi.json``.
        body: Gives an error that form.
    """
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": answer, "description": "Refused: the request has to change, or to come later (429)."},
        "5XX": {"model": answer, "description": "The server or its engine is away, or made a mistake."},
    }
    app = FastAPI(title=title, version=version("gradwire"), responses=errors, docs_url=None, redoc_url=None)
    _install(app, body)
    return app


def _install(app: FastAPI, body: ErrorBody) -> None:

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        request.scope[LOGGED] = True
        return error_response(internal_error(error, request.url.path), body)

    @app.exception_handler(ClientDisconnect)
    async def left(_request: Request, _error: ClientDisconnect) -> JSONResponse:
        message = "the body ended before its Content-Length: send it again"  # read by who has closed one side only
        return error_response(pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message), body)

    @app.exception_handler(ServiceError)
    async def refused(_request: Request, error: ServiceError) -> JSONResponse:
        return error_response(error.error, body)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(invalid_body(error), body, 422)

    @app.exception_handler(UnicodeEncodeError)
    async def no_text(_request: Request, error: UnicodeEncodeError) -> JSONResponse:
        message = "the body has a text with half of a surrogate pair, which is no Unicode"
        return error_response(pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message), body)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 400 and error.__cause__ is not None:
            message = _unreadable(error.__cause__)
        elif error.status_code in (404, 405):
            message = f"{request.method} {request.url.path[:200]} is not served here"
        code = pb.ERROR_CODE_UNSUPPORTED if error.status_code in (404, 405, 501) else pb.ERROR_CODE_INVALID_ARGUMENT
        response = error_response(pb.Error(code=code, message=message), body, error.status_code)
        response.headers.update(error.headers or {})
        return response
