"""``POST sessions/search``: a key's sessions by what was said of them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from gradwire_http.models import BoundedModel
from pydantic import AwareDatetime, Field

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.store import Metadata, Name, SessionRecord, TinkerStore


class Owner(BoundedModel):
    """The owner of sessions: ``accessible`` is everybody for an admin key, else the key itself."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Name] = Field(default=[], max_length=10)

    def sees(self, owner: str, caller: Caller) -> bool:
        """Whether a caller wants, and may see, what is this key's."""
        own = owner == caller.name
        if self.type == "own":
            return own
        return (own or caller.role == "admin") and (self.type == "accessible" or owner in self.owner_urns)


class StatusQuery(BoundedModel):
    """A status. Sessions are active or finished by their client here; none is cancelled or failed."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Name] | None = Field(default=None, max_length=10)


class Cursor(BoundedModel):
    """The last session of the page before."""

    last_created_at: AwareDatetime
    last_session_id: Name


class SearchRequest(BoundedModel):
    """The filters of a search for sessions."""

    session_id: Name | None = None
    project_ids: list[Name] | None = Field(default=None, max_length=200)
    user_metadata: Metadata = Field(default={})
    display_name: Name | None = Field(default=None, min_length=1)
    owner: Owner = Owner()
    statuses: list[StatusQuery] | None = Field(default=None, max_length=10)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: Cursor | None = None

    def finds(self, session: SessionRecord, caller: Caller) -> bool:
        """Whether a session is what is looked for."""
        named = self.session_id is None and self.display_name is None
        named = named or session.session_id == self.session_id
        if self.display_name is not None:
            name = session.display_name.casefold()
            named = named or all(word in name for word in self.display_name.casefold().split())
        return (
            named
            and self.owner.sees(session.owner, caller)
            and (self.project_ids is None or session.project_id in self.project_ids)
            and all(str(session.user_metadata.get(key)) == value for key, value in self.user_metadata.items())
            and (self.statuses is None or any(_has(session, status) for status in self.statuses))
        )


def routes(core: Core, store: TinkerStore) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/sessions/search")
    async def search_sessions(caller: CallerOf, request: SearchRequest) -> dict[str, Any]:
        """A page of sessions, the newest first."""
        matching = [session for session in store.sessions.values() if request.finds(session, caller)]
        matching.sort(key=_place, reverse=True)
        if (cursor := request.cursor) is not None:
            last = cursor.last_created_at.timestamp(), cursor.last_session_id
            matching = [session for session in matching if _place(session) < last]
        page = matching[: request.limit]
        counts, sizes = _checkpoints(core, store, {session.session_id for session in page})
        sessions = [
            {
                "session_id": session.session_id,
                "created_at": _time(session.created_at),
                "owner": session.owner or "anyone",
                "project_id": session.project_id,
                "status": _status(session),
                "display_name": session.display_name or None,
                "user_metadata": {name: str(value) for name, value in session.user_metadata.items()} or None,
                "checkpoints_count": counts[session.session_id],
                "checkpoint_storage_bytes": sizes[session.session_id],
            }
            for session in page
        ]
        more = len(matching) > len(page)
        ends = {"last_created_at": _time(page[-1].created_at), "last_session_id": page[-1].session_id} if more else None
        return {"sessions": sessions, "next_cursor": ends}

    return router


def _checkpoints(core: Core, store: TinkerStore, sessions: set[str]) -> tuple[Counter[str], Counter[str]]:
    """How many checkpoints of the protocol each session's models have, and their bytes."""
    counts, sizes = Counter[str](), Counter[str]()
    for model in store.models.values():
        if model.session_id in sessions and model.run_id:
            for saved in core.runs.list_checkpoints(Caller(model.owner), model.run_id):
                if TinkerPath.stored(model.model_id, saved.name) is not None:
                    counts[model.session_id] += 1
                    sizes[model.session_id] += saved.size_bytes
    return counts, sizes


def _place(session: SessionRecord) -> tuple[float, str]:
    return round(session.created_at, 6), session.session_id  # as exact as the text of a time


def _has(session: SessionRecord, status: StatusQuery) -> bool:
    if status.type == "active":
        return not session.ended
    finished = status.type == "client_finished" and session.ended
    return finished and (status.reasons is None or session.finish_reason in status.reasons)


def _status(session: SessionRecord) -> dict[str, Any]:
    if session.ended:
        return {"type": "client_finished", "reason": {"type": session.finish_reason}}
    return {"type": "active"}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(round(unix, 6), UTC).isoformat()
