"""`gradwire.v1.EngineService`: engines on other machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.engine_pb2 import EngineChunk
from gradwire_proto.v1.engine_pb2_grpc import EngineServiceServicer

from gradwire_server.core.core import Core
from gradwire_server.engine_client.remote import RemoteLife
from gradwire_server.engine_link.chunks import ADMITTED
from gradwire_server.errors import ServiceError


class EngineService(EngineServiceServicer):
    """The RPC of the agents, documented in ``engine.proto``.

    Args:
        core: The core that takes the engines.
    """

    def __init__(self, core: Core) -> None:
        self._agents = core.agents

    async def Attach(self, requests: AsyncIterator[EngineChunk], context: Any) -> AsyncIterator[EngineChunk]:
        await context.send_initial_metadata(((ADMITTED, "yes"),))  # the agent sends its offer now
        first = await anext(aiter(requests), EngineChunk())
        if not first.HasField("offer"):
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "the first chunk is to be the engine's offer")
        life = await self._agents.attach(first.offer)
        reading = asyncio.create_task(_read(requests, life))
        try:
            async for chunk in life.chunks():
                yield chunk
            if reading.done():
                reading.result()  # raises the error of a key that was revoked
        finally:
            self._agents.detach(life, "its agent is gone")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _read(requests: AsyncIterator[EngineChunk], life: RemoteLife) -> None:
    try:
        async for chunk in requests:
            await life.take(chunk)
    finally:
        await life.take(None)
