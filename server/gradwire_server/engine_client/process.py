"""The engine as the front sees it: a process that answers requests, and is followed by another one when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Sequence

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import EngineSettings
from gradwire_server.engine_client.client import (
    Away,
    EngineAnswer,
    EngineDied,
    EngineLife,
    Holder,
    Launcher,
)
from gradwire_server.engine_client.launcher import LocalLauncher
from gradwire_server.engine_link.frames import Buffer, LinkClosed
from gradwire_server.engine_link.pulses import PULSE_S
from gradwire_server.engine_link.vitals import BEAT_S, STALE_S, Vitals
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

HEALTHY_S = 60.0


class _Connection:
    """The requests to one process of an engine that it has not answered."""

    def __init__(self, life: EngineLife, vitals: Vitals):
        self.life, self._vitals = life, vitals
        self._waiting: dict[int, asyncio.Future[EngineAnswer]] = {}
        self._ids: dict[asyncio.Future[EngineAnswer], int] = {}
        self._on_frame: dict[int, Callable[[pb.SampleFrame], None]] = {}
        self.worked = False

    def request(
        self,
        request: engine_pb2.EngineRequest,
        payload: Sequence[Buffer],
        on_frame: Callable[[pb.SampleFrame], None] | None,
    ) -> asyncio.Future[EngineAnswer]:
        answer: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
        request_id = request.id
        self._waiting[request_id] = answer
        if on_frame is not None:
            self._on_frame[request_id] = on_frame
            answer.add_done_callback(lambda _: self._on_frame.pop(request_id, None))
        self._ids[answer] = request.id
        self.life.send(request, payload)
        return answer

    async def withdraw(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        if answer not in self._ids or not await self.life.withdraw(self._ids[answer]) or answer.done():
            return False
        self._settle(answer, (engine_pb2.EngineReply(not_started=pb.Empty()), b""))
        return True

    def stop(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        return answer in self._ids and self.life.stop(self._ids[answer])

    async def receive(self) -> None:
        while True:
            reply, payload = await self.life.receive()
            if reply.HasField("heartbeat"):
                self._vitals.take(reply.heartbeat)
                continue
            if reply.HasField("sample_frame"):
                if reply.id in self._on_frame:
                    self._on_frame[reply.id](reply.sample_frame)
                continue
            self.life.answered(reply.id)
            answer = self._waiting.pop(reply.id, None)
            if answer is not None:
                self._settle(answer, (reply, payload))
                self.worked = True

    def lost(self) -> None:
        """Fails what has no answer."""
        suspects = self.life.suspects(list(self._waiting))
        for request_id, answer in self._waiting.items():
            self._settle(answer, EngineDied(suspect=request_id in suspects))
        self._waiting.clear()
        self.life.close()

    def _settle(self, answer: asyncio.Future[EngineAnswer], outcome: EngineAnswer | EngineDied) -> None:
        self._ids.pop(answer, None)
        if answer.done():
            return
        if isinstance(outcome, EngineDied):
            answer.set_exception(outcome)
        elif outcome[0].HasField("error"):
            answer.set_exception(ServiceError.of(outcome[0].error))
        else:
            answer.set_result(outcome)


class EngineProcess:
    """Keeps an engine running, and carries requests to it.

    Args:
        launcher: Starts its processes, which are here or elsewhere.
        stale_s: Seconds without a heartbeat after which it is not ready.

    Attributes:
        is_stopping: Whether its end is expected.
    """

    def __init__(self, launcher: Launcher, number: int = 0, stale_s: float = STALE_S) -> None:
        self.launcher, self.number = launcher, number
        self._watchers: list[Callable[[], None]] = []
        self._ids = itertools.count(1)
        self._connection: _Connection | None = None
        self.is_stopping = self._worked = self._lived = self.fails_to_start = False
        self._supervisor: asyncio.Task[None] | None = None
        self.holder = Holder(alive=False)
        self._failed_starts = 0
        self.vitals = Vitals(stale_s)
        self.hello = engine_pb2.EngineHello()

    @classmethod
    def here(
        cls, settings: EngineSettings, number: int = 0, engines: int = 1, stale_s: float = STALE_S
    ) -> EngineProcess:
        """An engine on this machine, one of so many there."""
        return cls(LocalLauncher(settings, number, engines), number, stale_s)

    @property
    def models(self) -> Collection[str]:
        return self.launcher.models

    @property
    def machine(self) -> str:
        return self.launcher.machine

    @property
    def folder(self) -> str:
        return self.launcher.folder

    @property
    def is_away(self) -> bool:
        return self.launcher.is_away

    @property
    def is_ready(self) -> bool:
        return self.holder.alive and self.vitals.fresh

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher()

    async def start(self) -> None:
        """Starts the first process.

        Raises:
            ServiceError: what the engine says stopped it.
        """
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(started))
        await started

    def begin(self) -> None:
        """Wait for the first process in a task, however long."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        started.set_result(None)
        self._supervisor = asyncio.create_task(self._supervise(started))

    def request(
        self,
        request: engine_pb2.EngineRequest,
        payload: Sequence[Buffer] = (),
        on_frame: Callable[[pb.SampleFrame], None] | None = None,
    ) -> asyncio.Future[EngineAnswer]:
        if self._connection is None:
            answer: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
            answer.set_exception(EngineDied(suspect=False))
            return answer
        request.id = next(self._ids)
        return self._connection.request(request, payload, on_frame)

    async def withdraw(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        return self._connection is not None and await self._connection.withdraw(answer)

    def interrupt(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        return self._connection is not None and self._connection.stop(answer)

    async def stop(self, grace_s: float) -> None:
        """Lets the engine finish what it does, for so long, and ends it."""
        self.is_stopping = True
        connection = self._connection
        if connection is not None:
            shutdown = engine_pb2.EngineRequest(id=next(self._ids), shutdown=engine_pb2.EngineShutdown())
            connection.life.send(shutdown, ())
            try:
                await asyncio.wait_for(connection.life.exited(), grace_s)
            except TimeoutError:
                log.warning("engine %d did not end within %.0f s and is killed", self.number, grace_s)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        failures = 0
        while not self.is_stopping:
            pauses_s = self.launcher.pauses_s
            await asyncio.sleep(pauses_s[min(failures, len(pauses_s) - 1)])
            began, self._worked, self._lived = asyncio.get_running_loop().time(), False, False
            try:
                await self._live(started)
            except Away:
                pass
            except Exception as error:  # whatever it is: a server that has no engine says so, and tries for another
                last = isinstance(error, ServiceError) or self._failed_starts + 1 >= self.launcher.num_ways
                if not started.done() and last:
                    started.set_exception(_start_error(error))
                    return
                if not self.is_stopping:
                    expected = isinstance(error, (ServiceError, LinkClosed, OSError))
                    log.error("engine %d ended: %s", self.number, error, exc_info=None if expected else error)
            self.fails_to_start = not self._lived
            self._failed_starts = 0 if self._lived else self._failed_starts + 1
            self._changed()
            healthy = self._worked or asyncio.get_running_loop().time() - began > HEALTHY_S
            failures = 1 if healthy else failures + 1

    async def _live(self, started: asyncio.Future[None]) -> None:
        """The life of one engine process; ends by raising why it ended."""
        life = await self.launcher.launch(self._failed_starts)
        began = asyncio.get_running_loop().time()
        connection = _Connection(life, self.vitals)
        tasks, refused = [asyncio.create_task(self._watch_ranks(life))], False
        try:
            first, _ = await life.receive()
            if first.HasField("error"):
                refused = True
                raise ServiceError.of(first.error)
            self.hello = first.hello
            if self.machine:  # its files are not here
                self.hello.tokenizer_files.clear()
            self.holder, self._connection, self._lived = Holder(), connection, True
            self.vitals.started(asyncio.get_running_loop().time() - began)
            if not started.done():
                started.set_result(None)
            self._changed()
            tasks += [asyncio.create_task(work()) for work in (connection.receive, self._watch)]
            done, _pending = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            self._connection, self.holder.alive = None, False
            self._worked = connection.worked
            self._changed()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            how = await life.end()
            connection.lost()
            if not (self.is_stopping or refused):
                log.warning("engine %d: %s", self.number, how)

    async def _watch_ranks(self, life: EngineLife) -> None:
        """Hear the ranks of an engine process, if it has several, and kill it when something is wrong with them."""
        loop, ranks = asyncio.get_running_loop(), self.vitals.watched()
        last = loop.time()
        while not (trouble := ranks.trouble()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PULSE_S if ranks.newest else None):
                    pulse = await life.pulse()
                if pulse is None:
                    return
                ranks.heard(pulse)
            now = loop.time()
            ranks.waited(now - last)
            last = now
        log.critical("engine %d is killed, and starts again from its runs' journals: %s", self.number, trouble)
        life.kill()

    async def _watch(self) -> None:
        """Tells of an engine that is there and gives no sign, and of one that gives them again."""
        alive = True
        while True:
            await asyncio.sleep(BEAT_S)
            if self.is_ready != alive:
                alive = not alive
                if not alive:
                    log.warning("engine %d has given no sign of life for %.0f s", self.number, self.vitals.age_s)
                self._changed()


def _start_error(error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    return ServiceError(
        pb.ERROR_CODE_ENGINE_UNAVAILABLE, f"the engine did not start ({error}); its own words are above"
    )
