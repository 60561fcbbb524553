"""The Tinker protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel

from gradwire_server.core.core import Core
from gradwire_server.doors.http.errors import install
from gradwire_server.doors.http.protocol import Protocol

CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
}


class ClientConfigRequest(BaseModel):
    """The SDK that asks."""

    sdk_version: str = ""


class Tinker:
    """The state of the door between requests.

    Args:
        core: The core that executes the calls.
        stopping: Set when the server is about to stop.
    """

    def __init__(self, core: Core, stopping: asyncio.Event) -> None:
        self.core, self.stopping = core, stopping

    async def start(self) -> None:
        """Read what the state folder holds of the door."""

    async def stop(self) -> None:
        """Close it."""


def protocol(tinker: Tinker) -> Protocol:
    """The protocol over the door's state."""
    app = FastAPI(openapi_url=None)
    install(app, error_body)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the server answers."""
        return {"status": "stopping" if tinker.stopping.is_set() else "ok"}

    @app.post("/client/config")
    async def client_config(request: ClientConfigRequest) -> dict[str, Any]:
        """The flags that the SDK starts with."""
        return CLIENT_CONFIG

    @app.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        """The models that can be trained and sampled."""
        models = [
            {
                "model_name": model.name,
                "max_context_length": model.context_length,
                "trainable": True,
                "sampleable": True,
            }
            for model in tinker.core.models()
        ]
        return {"supported_models": models}

    return Protocol("tinker", "/api/v1", app, error_body, open_paths=("/healthz",))


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in the form that the SDK shows whole."""
    return {"detail": error.message}
