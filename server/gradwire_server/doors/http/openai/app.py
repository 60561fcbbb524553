"""The OpenAI protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel

from gradwire_server.core.core import Core
from gradwire_server.doors.http.errors import application, body_problem, error_response
from gradwire_server.doors.http.openai import chat, completions, files, uploads
from gradwire_server.doors.http.openai.fine_tuning import routes as fine_tuning
from gradwire_server.doors.http.openai.names import PREFIX, described, find_model, listed
from gradwire_server.doors.http.openai.requests import unsupported
from gradwire_server.doors.http.openai.tuned_models import find_tuned
from gradwire_server.doors.http.protocol import CallerOf, Protocol


class ErrorReason(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorAnswer(BaseModel):
    """An error."""

    error: ErrorReason


def protocol(core: Core, stopping: asyncio.Event) -> Protocol:
    """The protocol over a core; ``stopping`` is set when the server is about to stop."""
    app = application("gradwire for OpenAI's clients", OpenAIErrorAnswer, error_body)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(_reason(error), error_body, 400)

    @app.get("/models")
    async def list_models(caller: CallerOf) -> dict[str, Any]:
        return {"object": "list", "data": await listed(core, caller)}

    @app.get("/models/{name:path}")
    async def get_model(name: str, caller: CallerOf) -> dict[str, Any]:
        find_model(core, caller, name)
        tuned = find_tuned(core, caller, name)
        return described(name, tuned[1].created_at, tuned[0].owner) if tuned is not None else described(name)

    @app.delete("/models/{name:path}")
    async def delete_model(name: str, caller: CallerOf) -> dict[str, Any]:
        find_model(core, caller, name)
        tuned = find_tuned(core, caller, name.removeprefix(PREFIX))
        if tuned is None:
            raise unsupported("only what a fine-tuning job made can be deleted here; gradwire deletes runs", "model")
        await core.jobs.delete_model(caller, tuned[0].job_id)
        return {"id": name, "object": "model", "deleted": True}

    app.include_router(files.routes(core))
    app.include_router(uploads.routes(core))
    app.include_router(fine_tuning.routes(core))
    app.include_router(completions.routes(core, error_body))
    app.include_router(chat.routes(core, error_body))
    return Protocol("openai", "/v1", app, error_body, uploads=("/files", "/uploads/*/parts"))


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = pb.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
    if error.code == pb.ERROR_CODE_INVALID_BATCH and error.rule.startswith("tokens < "):
        code = "context_length_exceeded"  # agents shorten their conversation when they read this
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}


def _reason(error: RequestValidationError) -> pb.Error:
    first = error.errors()[0]
    problem = body_problem(first)
    field = "" if problem else str(first["loc"][1])[:100]
    if first["type"] == "extra_forbidden":
        text = f"{field} is not a parameter that this server knows"
    else:
        text = problem or f"{field}: {str(first['msg'])[:500]}"
    return pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=text, field=field)
