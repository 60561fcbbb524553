"""A reader of WatchRuns in tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from support.front import Client


class Watch:
    """What a stream has said so far."""

    def __init__(self, call: Any) -> None:
        self.call, self._messages = call, aiter(call)
        self.runs: dict[str, pb.Run] = {}
        self.gone: list[str] = []
        self.points: list[int] = []
        self.cursor, self.wholes, self.jobs = "", 0, 0

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(30):
            while not done():
                update = await anext(self._messages)
                self.wholes += update.whole
                self.jobs += update.jobs_changed
                self.runs |= {run.run_id: run for run in update.runs}
                self.gone += update.gone
                self.points += [point.seq for point in update.points]
                self.cursor = update.cursor or self.cursor


@asynccontextmanager
async def watching(client: Client, cursor: str = "", secret: str = "") -> AsyncIterator[Watch]:
    own: dict[str, Any] = {"metadata": [("authorization", f"Bearer {secret}")]} if secret else {}
    call = client.stub.WatchRuns(pb.WatchRunsRequest(cursor=cursor, with_points=True), **own)
    yield Watch(call)
    call.cancel()
