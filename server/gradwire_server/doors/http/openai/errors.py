"""The form of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel

from gradwire_server.doors.http.errors import body_problem, error_response


class ErrorReason(BaseModel):
    """The reason of an error."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorAnswer(BaseModel):
    """An error."""

    error: ErrorReason


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = pb.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
    if error.code == pb.ERROR_CODE_INVALID_BATCH and error.rule.startswith("tokens < "):
        code = "context_length_exceeded"  # agents shorten their conversation when they read this
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}


def explain_bodies(app: FastAPI) -> None:
    """Answer bodies that are not what a route takes with 400 and the field."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(invalid_field(error), error_body, 400)


def invalid_field(error: RequestValidationError) -> pb.Error:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    problem = body_problem(first)
    field = "" if problem else str(first["loc"][1])[:100]
    place = "" if problem else _place(first["loc"][1:], error.body)
    if first["type"] == "extra_forbidden":
        text = f"{place} is not a parameter that this server knows"
    else:
        text = problem or f"{place}: {str(first['msg'])[:500]}"
    return pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=text, field=field)


def _place(parts: Sequence[str | int], body: Any) -> str:
    """The path to a body's fault, without the names of union members that pydantic adds."""
    names = []
    for part in parts:
        if isinstance(body, list) and isinstance(part, int):
            body = body[part]
        elif isinstance(body, Mapping) and (part in body or part is parts[-1]):
            body = body.get(part)
        else:
            continue
        names.append(str(part))
    return ".".join(names or [str(parts[0])])[:100]
