"""The OpenAI protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.core.core import Core
from gradwire_server.doors.http.errors import install
from gradwire_server.doors.http.protocol import Protocol


def protocol(core: Core, stopping: asyncio.Event) -> Protocol:
    """The protocol over a core; ``stopping`` is set when the server is about to stop."""
    app = FastAPI(openapi_url=None)
    install(app, error_body)

    @app.get("/models")
    async def list_models() -> dict[str, Any]:
        """The base models."""
        data = [{"id": model.name, "object": "model", "created": 0, "owned_by": "gradwire"} for model in core.models()]
        return {"object": "list", "data": data}

    return Protocol("openai", "/v1", app, error_body)


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = pb.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}
