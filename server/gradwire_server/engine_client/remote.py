"""An engine on another machine, whose agent there has its process: how the front reaches it, and gives it up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine_client.client import Away, EngineAnswer
from gradwire_server.engine_link.chunks import ChunkedLink
from gradwire_server.engine_link.frames import LinkClosed
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

AHEAD = 16
"""Chunks that are received before the frames in them are taken."""


class RemoteLife:
    """A process of an engine on another machine, and the call of its agent.

    Args:
        lease_s: Seconds without a chunk from the agent after which it is given up.
        folders: The folders that it writes into; they are deleted when it is given up. Without the first one it can put
            nothing in a place where others find it. None where the store refuses what it writes too late.
        check: Called with what the engine says first; raises ServiceError if it must not be used.
    """

    def __init__(
        self, lease_s: float, folders: Sequence[Path], check: Callable[[engine_pb2.EngineHello], None]
    ) -> None:
        self._lease_s, self._folders, self._check = lease_s, folders, check
        self._arrived: asyncio.Queue[engine_pb2.EngineChunk | None] = asyncio.Queue(AHEAD)
        self._link = ChunkedLink(self._next, lambda number: self.reply(engine_pb2.EngineChunk(lease=number)))
        self.reply, self.send = self._link.send_first, self._link.send
        self._pulses: asyncio.Queue[engine_pb2.EnginePulse] = asyncio.Queue()
        self._withdrawing: dict[int, asyncio.Future[bool]] = {}
        self._suspects: Collection[int] = ()
        self._how = ""
        self._heard = asyncio.get_running_loop().time()
        self._ended = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())
        self.refusal: ServiceError | None = None

    # ---- the agent's call ----

    async def take(self, chunk: engine_pb2.EngineChunk | None) -> None:
        """Take a chunk from the agent, None for the end of its call."""
        self._heard = asyncio.get_running_loop().time()
        await self._arrived.put(chunk)

    def gone(self, how: str) -> None:
        """Give the engine up, whatever the agent may still send."""
        self._how = self._how or how
        while self._arrived.full():
            self._arrived.get_nowait()
        self._arrived.put_nowait(None)

    async def chunks(self) -> AsyncIterator[engine_pb2.EngineChunk]:
        """Yield the chunks for the agent, until the engine is given up.

        Raises:
            ServiceError: The engine was refused.
        """
        async for chunk in self._link.chunks():
            yield chunk
        if self.refusal is not None:
            raise self.refusal

    async def _next(self) -> engine_pb2.EngineChunk | None:
        chunk = await self._arrived.get()
        if chunk is None:
            self._arrived.put_nowait(None)
        return chunk

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while (left_s := self._heard + self._lease_s - loop.time()) > 0:  # noqa: ASYNC110  a time, no event
            await asyncio.sleep(left_s)
        self.gone(f"nothing was heard of its machine for {self._lease_s:g} s")

    # ---- the engine's life ----

    async def receive(self) -> EngineAnswer:
        while True:
            try:
                reply, payload = await self._link.receive(engine_pb2.EngineReply)
            except LinkClosed as error:
                raise LinkClosed(self._how or str(error)) from error
            if reply.HasField("hello"):
                try:
                    self._check(reply.hello)
                except ServiceError as error:
                    self.refusal = error
                    raise
            elif reply.HasField("pulse"):
                self._pulses.put_nowait(reply.pulse)
                continue
            elif reply.HasField("withdrawn"):
                self._withdrew(reply.id, reply.withdrawn.done)
                continue
            elif reply.HasField("ended"):
                self._suspects, self._how = set(reply.ended.suspects), reply.ended.reason
                raise LinkClosed(self._how)
            return reply, payload

    def answered(self, request_id: int) -> None:
        """The agent has seen the answer, too. A request that was answered was not withdrawn."""
        self._withdrew(request_id, False)

    async def withdraw(self, request_id: int) -> bool:
        known = self._withdrawing.get(request_id)
        if known is None:
            known = self._withdrawing[request_id] = asyncio.get_running_loop().create_future()
            ask = engine_pb2.EngineWithdraw(request=request_id)
            self.send(engine_pb2.EngineRequest(withdraw=ask))
        return await asyncio.shield(known)

    def stop(self, request_id: int) -> bool:
        """Whether it is stopped, its answer says."""
        self.send(engine_pb2.EngineRequest(stop=engine_pb2.EngineStop(request=request_id)))
        return True

    def suspects(self, unanswered: Sequence[int]) -> Collection[int]:
        """The requests that the agent named; none when its machine or the link is lost, which no request caused."""
        return self._suspects

    async def pulse(self) -> engine_pb2.EnginePulse | None:
        return await self._pulses.get()

    def kill(self) -> None:
        """The agent ends it when its call ends."""
        self.gone("it was given up")

    @property
    def has_ended(self) -> bool:
        """Whether it was given up, and can change nothing any more."""
        return self._ended.is_set()

    async def exited(self) -> None:
        await self._ended.wait()

    async def end(self) -> str:
        self._watching.cancel()
        self._link.end()
        try:
            await asyncio.to_thread(give_up, self._folders)
        except OSError as error:
            log.error("%s: waiting for the end of its lease, as its folder cannot be deleted: %s", self._how, error)
            await asyncio.sleep(self._lease_s)
        self._ended.set()
        return self._how or "the link to its machine was closed"

    def close(self) -> None:
        for request_id in list(self._withdrawing):
            self._withdrew(request_id, False)

    def _withdrew(self, request_id: int, done: bool) -> None:
        known = self._withdrawing.pop(request_id, None)
        if known is not None and not known.done():
            known.set_result(done)


class RemoteLauncher:
    """Provides the processes that the agent on a machine offers, one at a time.

    Args:
        machine: The agent's name.
        patience_s: How long a run whose operation may have killed the engine waits for the next one.
    """

    pauses_s = (0.0,)

    num_ways = 1

    def __init__(self, machine: str, patience_s: float) -> None:
        self.machine, self._patience_s = machine, patience_s
        self.models: Collection[str] = ()
        self.folder = ""
        self._offered: asyncio.Queue[RemoteLife] = asyncio.Queue()
        self._newest: RemoteLife | None = None

    @property
    def is_away(self) -> bool:
        """Whether the last process was given up, and no other is offered."""
        return self._newest is None or self._newest.has_ended

    def offer(self, life: RemoteLife, models: Collection[str]) -> None:
        """Offer the next process, of an engine that may hold these models."""
        self._newest, self.models = life, models
        self._offered.put_nowait(life)

    async def launch(self, failed_starts: int) -> RemoteLife:
        try:
            return await asyncio.wait_for(self._offered.get(), self._patience_s)
        except TimeoutError:
            raise Away from None


def give_up(folders: Sequence[Path]) -> None:
    """Delete the folders of an engine, so that what it still does changes nothing."""
    for folder in folders:
        gone = folder.with_name(f"{folder.name}.gone")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)  # at once; what is open in it can still be written, but no longer be put in its place
        shutil.rmtree(gone, ignore_errors=True)
