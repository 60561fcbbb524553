"""The OpenAI protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.core.core import Core
from gradwire_server.doors.http.errors import error_response, install
from gradwire_server.doors.http.openai import chat, completions
from gradwire_server.doors.http.openai.names import base_model, described, listed
from gradwire_server.doors.http.protocol import CallerOf, Protocol


def protocol(core: Core, stopping: asyncio.Event) -> Protocol:
    """The protocol over a core; ``stopping`` is set when the server is about to stop."""
    app = FastAPI(openapi_url=None)
    install(app, error_body)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(_reason(error), error_body, 400)

    @app.get("/models")
    async def list_models(caller: CallerOf) -> dict[str, Any]:
        return {"object": "list", "data": await listed(core, caller)}

    @app.get("/models/{name:path}")
    async def get_model(name: str, caller: CallerOf) -> dict[str, Any]:
        base_model(core, caller, name)
        return described(name)

    app.include_router(completions.routes(core, error_body))
    app.include_router(chat.routes(core, error_body))
    return Protocol("openai", "/v1", app, error_body)


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = pb.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}


def _reason(error: RequestValidationError) -> pb.Error:
    first = error.errors()[0]
    field = str(first["loc"][1]) if len(first["loc"]) > 1 else ""
    if first["type"] == "extra_forbidden":
        text = f"{field[:100]} is not a parameter that this server knows"
    elif first["type"] == "model_attributes_type":
        text = "the body is not a JSON object; send one, with Content-Type: application/json"
    else:
        text = f"{field[:100] or 'the body'}: {str(first['msg'])[:500]}"
    return pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=text, field=field[:100])
