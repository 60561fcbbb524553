"""`gradwire.v1.SessionService`: each RPC is one call on the core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1.sessions_pb2_grpc import SessionServiceServicer

from gradwire_server.core.core import Core
from gradwire_server.doors.grpc.interceptors import CALLER


class SessionService(SessionServiceServicer):
    """The RPCs of the session service, documented in ``sessions.proto``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def CreateRolloutSession(
        self, request: sessions.CreateRolloutSessionRequest, context: Any
    ) -> sessions.RolloutSession:
        return await self._core.rollouts.create(CALLER.get(), request)

    async def GetRolloutSession(
        self, request: sessions.GetRolloutSessionRequest, context: Any
    ) -> sessions.RolloutSession:
        return self._core.rollouts.get(CALLER.get(), request.session_id)

    async def ListRolloutSessions(
        self, request: sessions.ListRolloutSessionsRequest, context: Any
    ) -> sessions.ListRolloutSessionsResponse:
        page, token = self._core.rollouts.page(CALLER.get(), request)
        return sessions.ListRolloutSessionsResponse(sessions=page, next_page_token=token)

    async def EndRolloutSession(
        self, request: sessions.EndRolloutSessionRequest, context: Any
    ) -> sessions.RolloutSession:
        return await self._core.rollouts.end(CALLER.get(), request)

    async def DeleteRolloutSession(
        self, request: sessions.DeleteRolloutSessionRequest, context: Any
    ) -> sessions.DeleteRolloutSessionResponse:
        await self._core.rollouts.delete(CALLER.get(), request.session_id)
        return sessions.DeleteRolloutSessionResponse()

    async def GetRollout(
        self, request: sessions.GetRolloutRequest, context: Any
    ) -> AsyncIterator[sessions.RolloutFrame]:
        rollout = self._core.rollouts.rollout(CALLER.get(), request.session_id, request.first)
        async with aclosing(rollout) as frames:
            async for frame in frames:
                yield frame
