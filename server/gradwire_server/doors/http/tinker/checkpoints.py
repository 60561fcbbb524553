"""Routes of checkpoints, training runs and sessions: listings, expiry, deletion, publication, information."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import AwareDatetime, Field

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.audit import note
from gradwire_server.doors.http.tinker.models import UNEMBED, Models
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.session_search import Owner
from gradwire_server.doors.http.tinker.sessions import session_of
from gradwire_server.doors.http.tinker.store import MAX_TTL_S, Metadata, ModelRecord, Name, SavedRecord, TinkerStore
from gradwire_server.errors import ServiceError, unknown_checkpoint

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
Limit = Annotated[int, Query(ge=1, le=10_000)]
Offset = Annotated[int, Query(ge=0)]


class TtlRequest(BoundedModel):
    """When a checkpoint expires, from now."""

    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_S)


class PathRequest(BoundedModel):
    """A checkpoint's path."""

    tinker_path: str


class CheckpointCursor(BoundedModel):
    """The last checkpoint of the page before; its path takes the place of an id."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: Name


class CheckpointSearch(BoundedModel):
    """The filters of a search for checkpoints."""

    project_ids: list[Name] | None = Field(default=None, max_length=200)
    user_metadata: Metadata = Field(default={})
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: Owner = Owner()
    base_models: list[Name] | None = Field(default=None, max_length=200)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: CheckpointCursor | None = None

    def finds(self, checkpoint: dict[str, Any]) -> bool:
        """Whether a checkpoint of a model that is looked for is too."""
        said = checkpoint.get("user_metadata") or {}
        return self.checkpoint_type in (None, checkpoint["checkpoint_type"]) and all(
            said.get(key) == value for key, value in self.user_metadata.items()
        )


def routes(core: Core, store: TinkerStore, models: Models, saved_weights: SavedWeights) -> APIRouter:
    """The routes over the door's state."""
    router = APIRouter()

    @router.get("/training_runs")
    async def training_runs(
        caller: CallerOf, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
    ) -> dict[str, Any]:
        """A page of the caller's models, or of those of one project's sessions, the newest first."""
        own = [model for model in _own(store.models.values(), caller) if model.run_id]
        if project_id is not None:
            of_project = {session.session_id for session in store.sessions.values() if session.project_id == project_id}
            own = [model for model in own if model.session_id in of_project]
        page = sorted(own, key=lambda model: -model.created_at)[offset : offset + limit]
        return {"training_runs": [_run(caller, model) for model in page], "cursor": _cursor(offset, limit, len(own))}

    @router.get("/training_runs/{model_id}")
    async def training_run(caller: CallerOf, model_id: str) -> dict[str, Any]:
        """One model."""
        return _run(caller, await models.created(caller, model_id))

    @router.get("/training_runs/{model_id}/checkpoints")
    async def run_checkpoints(caller: CallerOf, model_id: str) -> dict[str, Any]:
        """A model's checkpoints, the newest first."""
        model = await models.created(caller, model_id)
        return {"checkpoints": _checkpoints(caller, [model])}

    @router.get("/checkpoints")
    async def all_checkpoints(caller: CallerOf, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        """A page of the caller's checkpoints, the newest first."""
        listed = _checkpoints(caller, [model for model in _own(store.models.values(), caller) if model.run_id])
        return {"checkpoints": listed[offset : offset + limit], "cursor": _cursor(offset, limit, len(listed))}

    @router.post("/checkpoints/search")
    async def search_checkpoints(caller: CallerOf, request: CheckpointSearch) -> dict[str, Any]:
        """A page of the checkpoints that are looked for, the newest first."""
        sessions = {session.session_id: session.project_id for session in store.sessions.values()}
        wanted = [
            model
            for model in store.models.values()
            if model.run_id
            and request.owner.sees(model.owner, caller)
            and (request.project_ids is None or sessions.get(model.session_id, "") in request.project_ids)
            and (request.base_models is None or model.base_model in request.base_models)
        ]
        listed = [checkpoint for checkpoint in _checkpoints(caller, wanted) if request.finds(checkpoint)]
        listed.sort(key=_place, reverse=True)
        if (cursor := request.cursor) is not None:
            last = cursor.last_created_at, cursor.last_checkpoint_uuid
            listed = [checkpoint for checkpoint in listed if _place(checkpoint) < last]
        page, cursors = listed[: request.limit], None
        if len(listed) > len(page):
            cursors = {"last_created_at": page[-1]["time"], "last_checkpoint_uuid": page[-1]["tinker_path"]}
        return {"checkpoints": page, "next_cursor": cursors}

    @router.delete(CHECKPOINT)
    async def delete_checkpoint(caller: CallerOf, model_id: str, kind: str, name: str) -> dict[str, Any]:
        """Delete a checkpoint."""
        _, path = _named(caller, model_id, kind, name)
        await saved_weights.delete(caller, path)
        await note(store, caller, "checkpoint_delete", str(path))
        return {}

    @router.put(CHECKPOINT + "/ttl")
    async def set_ttl(caller: CallerOf, model_id: str, kind: str, name: str, request: TtlRequest) -> dict[str, Any]:
        """Set when a checkpoint expires, or that it never does."""
        expires = None if request.ttl_seconds is None else time.time() + request.ttl_seconds
        _, path = _named(caller, model_id, kind, name)
        if path.kind == "external_weights":
            saved_weights.export(caller, path)
        else:
            saved_weights.checkpoint(caller, str(path))
        record = saved_weights.record(path)
        if record is None:
            raise unknown_checkpoint(str(path))
        await store.put(store.saved, record.model_copy(update={"expires_at": expires}))
        await note(store, caller, "checkpoint_ttl_set", str(path), ttl_seconds=request.ttl_seconds)
        return {}

    @router.post(CHECKPOINT + "/publish")
    async def publish(caller: CallerOf, model_id: str, kind: str, name: str) -> dict[str, Any]:
        """Let every key read a checkpoint."""
        await _publish(caller, str(_named(caller, model_id, kind, name)[1]), True)
        return {}

    @router.delete(CHECKPOINT + "/publish")
    async def unpublish(caller: CallerOf, model_id: str, kind: str, name: str) -> dict[str, Any]:
        """Let only the owner's key read a checkpoint again."""
        await _publish(caller, str(_named(caller, model_id, kind, name)[1]), False)
        return {}

    @router.post("/weights_info")
    async def weights_info(caller: CallerOf, request: PathRequest) -> dict[str, Any]:
        """Describe the model and adapter of a checkpoint."""
        saved_weights.checkpoint(caller, request.tinker_path)
        model = store.models[TinkerPath.read(request.tinker_path).model_id]
        trained = core.runs.get(Caller(model.owner), model.run_id).config.lora.target_modules
        return {
            "base_model": model.base_model, "is_lora": True, "lora_rank": model.rank,
            "train_unembed": UNEMBED in trained, "train_mlp": model.train_mlp, "train_attn": model.train_attn,
        }  # fmt: skip

    @router.get("/sessions")
    async def sessions(caller: CallerOf, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        """A page of the caller's sessions, the newest first."""
        own = sorted(_own(store.sessions.values(), caller), key=lambda session: -session.created_at)
        return {"sessions": [session.session_id for session in own[offset : offset + limit]]}

    @router.get("/sessions/{session_id}")
    async def session(caller: CallerOf, session_id: str) -> dict[str, Any]:
        """List the training runs and samplers of a session."""
        listed = session_of(store, caller.name, session_id)
        runs = [model.model_id for model in store.models.values() if model.session_id == session_id]
        samplers = [each.sampler_id for each in store.samplers.values() if each.session_id == session_id]
        return {"training_run_ids": runs, "sampler_ids": samplers, "user_metadata": _texts(listed.user_metadata)}

    async def _publish(caller: Caller, path: str, public: bool) -> None:
        await core.runs.publish(caller, saved_weights.checkpoint(caller, path), public)
        await note(store, caller, "checkpoint_publish" if public else "checkpoint_unpublish", path)

    def _named(caller: Caller, model_id: str, kind: str, name: str) -> tuple[ModelRecord, TinkerPath]:
        path = TinkerPath.of(model_id, f"{kind}/{name}")
        try:
            return models.get(caller, model_id), path
        except ServiceError:
            raise unknown_checkpoint(str(path)) from None

    def _run(caller: Caller, model: ModelRecord) -> dict[str, Any]:
        newest = _checkpoints(caller, [model])
        run = {
            "training_run_id": model.model_id, "base_model": model.base_model, "model_owner": model.owner or "anyone",
            "is_lora": True, "corrupted": False, "lora_rank": model.rank, "last_request_time": _time(model.used_at),
            "user_metadata": _texts(model.user_metadata),
        }  # fmt: skip
        for field, kind in (("last_checkpoint", "training"), ("last_sampler_checkpoint", "sampler")):
            of_kind = [checkpoint for checkpoint in newest if checkpoint["checkpoint_type"] == kind]
            run |= {field: of_kind[0]} if of_kind else {}
        return run

    def _checkpoints(caller: Caller, of: Iterable[ModelRecord]) -> list[dict[str, Any]]:
        listed: list[tuple[float, dict[str, Any]]] = []
        exports: dict[str, list[SavedRecord]] = {}
        for record in store.saved.values():
            if record.size_bytes is not None:
                exports.setdefault(TinkerPath.read(record.path).model_id, []).append(record)
        for model in of:
            for saved in core.runs.list_checkpoints(caller, model.run_id):
                path = TinkerPath.stored(model.model_id, saved.name)
                if path is not None:
                    listed.append((saved.created_at, _checkpoint(model, path, saved, saved_weights.record(path))))
            for record in exports.get(model.model_id, ()):
                written = pb.Checkpoint(created_at=record.created_at, size_bytes=record.size_bytes or 0)
                listed.append((record.created_at, _checkpoint(model, TinkerPath.read(record.path), written, record)))
        return [checkpoint for _, checkpoint in sorted(listed, key=lambda each: -each[0])]

    return router


def _checkpoint(
    model: ModelRecord, path: TinkerPath, saved: pb.Checkpoint, record: SavedRecord | None
) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {
        "checkpoint_id": path.checkpoint_id, "checkpoint_type": TYPES[path.kind], "time": _time(saved.created_at),
        "tinker_path": str(path), "size_bytes": saved.size_bytes, "public": saved.public,
        "base_model": model.base_model,
    }  # fmt: skip
    if record is not None:
        checkpoint["user_metadata"] = _texts(record.user_metadata)
        if record.expires_at is not None:
            checkpoint["expires_at"] = _time(record.expires_at)
    return checkpoint


def _place(checkpoint: dict[str, Any]) -> tuple[datetime, str]:
    return datetime.fromisoformat(checkpoint["time"]), str(checkpoint["tinker_path"])


def _own(records: Iterable[Any], caller: Caller) -> list[Any]:
    return [record for record in records if caller.role == "admin" or record.owner == caller.name]


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat()


def _texts(metadata: dict[str, Any]) -> dict[str, str] | None:
    return {name: str(value) for name, value in metadata.items()} or None
