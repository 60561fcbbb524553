"""Routes of start-up and sessions."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import Field

from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.store import Metadata, Name, SessionRecord, TinkerStore
from gradwire_server.errors import ServiceError

MAX_TAGS = 64
Tag = Annotated[str, Field(max_length=200)]
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 65_536,
    "fwdbwd_max_chunk_bytes_count": 32_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 128_000_000,
    "sample_max_concurrent_requests": 2000,
}
"""The SDK's flags. A batch is one request up to this size: several requests add up in the same way, and cost more.
``proto_write_fwdbwd`` and ``fwd_via_fwdbwd`` make releases before 0.25 send what later ones always send."""
OLDEST_SDK = (0, 23)
"""The first release of the SDK that has those two flags. Earlier ones send batches in JSON, and hang on a refusal."""
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


class SessionRequest(BoundedModel):
    """A new session."""

    tags: list[Tag] = Field(default=[], max_length=MAX_TAGS)
    user_metadata: Metadata | None = None
    sdk_version: Tag = ""
    project_id: Tag | None = None
    display_name: Tag | None = None


class ProjectRequest(BoundedModel):
    """The project of a session."""

    project_id: Name = Field(min_length=1)


class FinishReason(BoundedModel):
    """How a client's program ended."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishRequest(BoundedModel):
    """The end of a session."""

    reason: FinishReason = FinishReason()


class SessionIdRequest(BoundedModel):
    """A request about a session."""

    session_id: Name


def routes(core: Core, store: TinkerStore, stopping: asyncio.Event) -> APIRouter:
    """The routes over a core."""
    router = APIRouter()

    @router.post("/client/config")
    async def client_config() -> dict[str, Any]:
        """The flags that the SDK starts with."""
        return CLIENT_CONFIG

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        """The flags that the SDK asks for again."""
        return DYNAMIC_CONFIG

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the server answers."""
        return {"status": "stopping" if stopping.is_set() else "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        """The models that can be trained and sampled."""
        models = [
            {"model_name": each.name, "max_context_length": each.context_length, "trainable": True, "sampleable": True}
            for each in core.models()
        ]
        return {"supported_models": models}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        """Accept the SDK's events, and drop them."""
        return {"status": "accepted"}

    @router.post("/create_session")
    async def create_session(caller: CallerOf, request: SessionRequest) -> dict[str, Any]:
        """Begin a session."""
        _check_sdk(request.sdk_version)
        record = SessionRecord(
            owner=caller.name,
            session_id=str(uuid.uuid4()),
            tags=request.tags,
            user_metadata=request.user_metadata or {},
            project_id=request.project_id or "",
            display_name=request.display_name or "",
        )
        await store.put(store.sessions, record)
        return {"type": "create_session", "session_id": record.session_id}

    @router.post("/session_heartbeat")
    async def session_heartbeat(caller: CallerOf, request: SessionIdRequest) -> dict[str, str]:
        """Keep a session alive."""
        store.session_used_at[session_of(store, caller.name, request.session_id).session_id] = time.time()
        return {"type": "session_heartbeat"}

    @router.put("/sessions/{session_id}/project")
    async def assign_project(caller: CallerOf, session_id: str, request: ProjectRequest) -> None:
        """Put a session, with its runs and samplers, into a project."""
        session = session_of(store, caller.name, session_id)
        await store.put(store.sessions, session.model_copy(update={"project_id": request.project_id}))

    @router.post("/sessions/{session_id}/finish")
    async def finish(caller: CallerOf, session_id: str, request: FinishRequest | None = None) -> dict[str, str]:
        """End a session."""
        session = session_of(store, caller.name, session_id)
        reason = (request or FinishRequest()).reason.type
        await store.put(store.sessions, session.model_copy(update={"ended": True, "finish_reason": reason}))
        return {"type": "finish_session"}

    return router


def _check_sdk(version: str) -> None:
    """Refuse releases of the SDK whose batches the server does not read; a text that is no version passes."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_SDK:
        oldest = ".".join(map(str, OLDEST_SDK))
        message = f"this server works with the tinker SDK {oldest} to 0.38; yours is {version}: pip install -U tinker"
        raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="sdk_version")


def session_of(store: TinkerStore, owner: str, session_id: str) -> SessionRecord:
    """A session of a key's."""
    session = store.sessions.get(session_id)
    if session is None or session.owner != owner:
        message = f"there is no session {session_id[:100]!r}: create one, with the same key"
        raise ServiceError(pb.ERROR_CODE_UNKNOWN_RUN, message, field="session_id")
    return session
