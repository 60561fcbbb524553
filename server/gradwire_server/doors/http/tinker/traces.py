"""A session's operations as a trace that Perfetto's viewer opens, by a signed URL.

It is in the JSON form of trace events, which Perfetto reads beside its own, and is written while it is sent. It has the
operations in the records of the session's models, which long runs thin out, with the time of the engine; no samples.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.sessions import session_of
from gradwire_server.doors.http.tinker.signed_urls import SignedUrls
from gradwire_server.doors.http.tinker.store import TinkerStore
from gradwire_server.errors import ServiceError

SIGNED = "/session_traces/"
"""Beginning of the signed paths, relative to the protocol's prefix."""


def routes(core: Core, store: TinkerStore) -> APIRouter:
    """The routes."""
    router, signed = APIRouter(), SignedUrls(core.keys, store.url_secret, SIGNED)

    @router.get("/sessions/{session_id}/trace_export")
    async def trace_export(caller: CallerOf, request: Request, session_id: str) -> dict[str, str]:
        """A signed URL of the trace, which is valid for an hour."""
        session_of(store, caller.name, session_id)
        return {"status": "ready", "url": signed.make(request, caller.name, session_id)}

    @router.get(SIGNED + "{token}")
    async def trace(request: Request, token: str) -> StreamingResponse:
        """The trace, by a signed URL."""
        session_id = signed.read(request, token)
        return StreamingResponse(_written(session_id), media_type="application/json")

    async def _written(session_id: str) -> AsyncGenerator[str]:
        yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
        models = [model for model in store.models.values() if model.session_id == session_id and model.run_id]
        yield json.dumps(_name("process_name", 0, f"session {session_id}"))
        for thread, model in enumerate(models, 1):
            yield ",\n" + json.dumps(_name("thread_name", thread, f"{model.model_id} ({model.base_model})"))
            try:
                async for points in core.runs.history(Caller(model.owner), model.run_id):
                    own = (point for point in points if point.run_id == model.run_id)
                    yield "".join(",\n" + json.dumps(_event(thread, point)) for point in own)
            except ServiceError as error:  # the run was deleted meanwhile
                if error.code != pb.ERROR_CODE_UNKNOWN_RUN:
                    raise
        yield "\n]}\n"

    return router


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}


def _event(thread: int, point: pb.HistoryPoint) -> dict[str, Any]:
    """A slice that ends when the result was there. Times are microseconds."""
    arguments = {"seq": point.seq, "step": point.step, "tokens": point.tokens}
    if point.loss_fn:
        arguments["loss_fn"] = point.loss_fn  # type: ignore[assignment]
    return {
        "ph": "X", "pid": 1, "tid": thread, "cat": "training", "name": point.operation,
        "ts": (point.time - point.seconds) * 1e6, "dur": point.seconds * 1e6, "args": arguments,
    }  # fmt: skip
