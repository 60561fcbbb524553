"""``/v1/sessions``: rollout sessions in JSON, for programs without the SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from google.protobuf.message import Message
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import sessions_pb2 as sessions
from pydantic import ConfigDict, Field

from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.errors import invalid


class Limits(BoundedModel):
    """Limits of a session; 0 is the server's own."""

    model_config = ConfigDict(extra="forbid")

    max_turns: int = Field(default=0, ge=0, lt=2**32)
    max_tokens: int = Field(default=0, ge=0, lt=2**63)
    max_seconds: float = Field(default=0, ge=0, allow_inf_nan=False)
    max_concurrent_calls: int = Field(default=0, ge=0, lt=2**32)
    idle_s: float = Field(default=0, ge=0, allow_inf_nan=False)


class Sampling(BoundedModel):
    """How a session samples."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    fixed: bool = False


class SessionRequest(BoundedModel):
    """``POST /v1/sessions``."""

    model_config = ConfigDict(extra="forbid")

    model: str
    task: Any = None
    group: str = ""
    name: str = ""
    limits: Limits = Field(default_factory=Limits)
    sampling: Sampling = Field(default_factory=Sampling)
    history: str = ""
    idempotency_key: str = ""


class EndRequest(BoundedModel):
    """``POST /v1/sessions/ID/end``."""

    model_config = ConfigDict(extra="forbid")

    reason: str = ""
    reward: float | None = Field(default=None, allow_inf_nan=False)
    turn_rewards: dict[str, Any] = Field(default_factory=dict)


def routes(core: Core) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/sessions")
    async def create_session(asked: SessionRequest, caller: CallerOf) -> dict[str, Any]:
        request = sessions.CreateRolloutSessionRequest(
            model=asked.model, task_json=json.dumps(asked.task), group=asked.group, name=asked.name,
            limits=sessions.SessionLimits(**asked.limits.model_dump()),
            sampling=sessions.SessionSampling(**asked.sampling.model_dump(exclude_none=True)),
            history=asked.history, idempotency_key=asked.idempotency_key,
        )  # fmt: skip
        return _session(await core.rollouts.create(caller, request))

    @router.get("/sessions")
    async def list_sessions(
        caller: CallerOf, run_id: str = "", group: str = "", state: str = "", limit: int = 100, after: str = ""
    ) -> dict[str, Any]:
        request = sessions.ListRolloutSessionsRequest(
            run_id=run_id, group=group, state=state, page_size=min(max(limit, 1), 1000), page_token=after
        )
        page, token = core.rollouts.page(caller, request)
        return {"object": "list", "data": [_session(each) for each in page], "has_more": bool(token)}

    @router.get("/sessions/{session_id}")
    async def get_session(session_id: str, caller: CallerOf) -> dict[str, Any]:
        return _session(core.rollouts.get(caller, session_id))

    @router.post("/sessions/{session_id}/end")
    async def end_session(session_id: str, asked: EndRequest, caller: CallerOf) -> dict[str, Any]:
        request = sessions.EndRolloutSessionRequest(
            session_id=session_id, reason=asked.reason, reward=asked.reward, turn_rewards=_rewards(asked.turn_rewards)
        )
        return _session(await core.rollouts.end(caller, request))

    @router.delete("/sessions/{session_id}")
    async def delete_session(session_id: str, caller: CallerOf) -> dict[str, Any]:
        await core.rollouts.delete(caller, session_id)
        return {"id": session_id, "object": "session", "deleted": True}

    @router.get("/sessions/{session_id}/rollout")
    async def get_rollout(session_id: str, caller: CallerOf, first: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {"object": "rollout", "turns": []}
        async with aclosing(core.rollouts.rollout(caller, session_id, max(first, 0))) as frames:
            async for frame in frames:
                if frame.HasField("session"):
                    found["session"] = _session(frame.session)
                found["turns"] += map(_plain, frame.turns)
        return found

    return router


def _rewards(given: Mapping[str, Any]) -> dict[int, float]:
    """Rewards by number of the turn."""
    if not all(number.isdecimal() and len(number) < 10 for number in given) or not all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in given.values()
    ):
        raise invalid("turn_rewards has the numbers of turns, and a number for each", "turn_rewards")
    return {int(number): float(each) for number, each in given.items()}


def _session(session: sessions.RolloutSession) -> dict[str, Any]:
    found = {"id": session.session_id, "object": "session", **_plain(session)}
    if not session.key:
        del found["key"]
    return found


def _plain(message: Message) -> dict[str, Any]:
    """A message as JSON data: every field but those that may be absent and are; fields of JSON as what they hold."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = [_plain(each) if field.message_type else each for each in value]
        elif field.message_type:
            found[field.name] = _plain(value)
        elif field.name.endswith("_json"):
            found[field.name.removesuffix("_json")] = json.loads(value) if value else None
        elif not field.has_presence or message.HasField(field.name):
            found[field.name] = value
    return found
