"""The OpenAI protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

import asyncio
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.core.core import Core
from gradwire_server.core.jobs.states import SUCCEEDED
from gradwire_server.doors.http.errors import application
from gradwire_server.doors.http.openai import chat, completions, files, rollout_sessions, uploads
from gradwire_server.doors.http.openai.errors import OpenAIErrorAnswer, error_body, explain_bodies
from gradwire_server.doors.http.openai.fine_tuning import routes as fine_tuning
from gradwire_server.doors.http.openai.names import PREFIX, described, find_model, listed
from gradwire_server.doors.http.openai.requests import unsupported
from gradwire_server.doors.http.openai.responses import routes as responses
from gradwire_server.doors.http.openai.tuned_models import find_tuned, tuned_name
from gradwire_server.doors.http.protocol import CallerOf, HttpProtocol
from gradwire_server.errors import ServiceError

FOR_AGENTS = ("/chat/completions", "/completions", "/responses", "/responses/*", "/models", "/models/*")


def protocol(core: Core, stopping: asyncio.Event) -> HttpProtocol:
    """The protocol over a core; ``stopping`` is set when the server is about to stop."""
    app = application("gradwire for OpenAI's clients", OpenAIErrorAnswer, error_body)

    explain_bodies(app)

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
        job = tuned[0]
        if job.owner != caller.name and not caller.sees_all:
            message = f"{name[:200]} is shared with this key: only its owner can delete it"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message, field="model")
        if job.state == SUCCEEDED and name.removeprefix(PREFIX) != tuned_name(job):
            raise unsupported(f"a checkpoint goes with its model: delete {tuned_name(job)}", "model")
        await core.jobs.delete_model(caller, job.job_id)
        return {"id": name, "object": "model", "deleted": True}

    app.include_router(files.routes(core))
    app.include_router(uploads.routes(core))
    app.include_router(fine_tuning.routes(core))
    app.include_router(completions.routes(core, error_body))
    app.include_router(chat.routes(core, error_body))
    app.include_router(responses.routes(core))
    app.include_router(rollout_sessions.routes(core))

    @app.post("/embeddings", status_code=404, include_in_schema=False)
    async def no_embeddings() -> None:
        message = (
            "this server has language models and makes no embeddings: their pooled states were never trained to compare"
            " texts; ask a server of an embedding model, e.g. vLLM or text-embeddings-inference"
        )
        raise ServiceError(pb.ERROR_CODE_UNKNOWN_MODEL, message, field="model")

    return HttpProtocol("openai", "/v1", app, error_body, uploads=("/files", "/uploads/*/parts"), for_agents=FOR_AGENTS)
