"""Engines on the server's machine and on others: real agents, whose processes, calls and network are simulated."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gradwire.errors import ConnectionLostError
from gradwire_proto.v1 import engine_pb2
from gradwire_server.agent.agent import Agent
from gradwire_server.doors.grpc.door import EngineService
from gradwire_server.engine_client.client import EngineAnswer, EngineDied
from gradwire_server.engine_client.remote import RemoteLife
from gradwire_server.engine_link import lease
from gradwire_server.engine_link.chunks import ChunkedLink
from gradwire_server.engine_link.frames import LinkClosed
from gradwire_server.engine_link.vitals import BEAT_S
from gradwire_server.errors import ServiceError
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import Place, Superseded

from support.fake_engine import FakeEngine
from support.simulation.checker import ident
from support.simulation.loop import Process, current_process
from support.simulation.network import Call

if TYPE_CHECKING:
    from support.simulation.world import World

if TYPE_CHECKING:
    from support.simulation.world import World


class SimulatedEngine(FakeEngine):
    """Engine that takes time, dies now and then, and records what it executed."""

    file_bytes = 10

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.disk.state_dir, number)
        self._world = world
        self.death_probability = 0.0

    async def work(self, request: engine_pb2.EngineRequest) -> None:
        rng = self._world.rng
        await asyncio.sleep(rng.expovariate(1 / 0.005))
        if rng.random() < self.death_probability:
            self.die()
            raise EngineDied(suspect=False)

    def _operation(self, asked: engine_pb2.EngineOperation, payload: bytes, reply: engine_pb2.EngineReply) -> Any:
        operation, before = asked.operation, len(self.seen)
        kind = operation.WhichOneof("kind")
        if kind == "forward_backward" and not payload.endswith(ident(operation).encode()):
            self._world.defects.append(f"{ident(operation)} came with the payload {payload[:40]!r}")
        try:
            return super()._operation(asked, payload, reply)[0], b""
        finally:
            if len(self.seen) > before and kind != "zero_grad" and operation.save_checkpoint.note != "automatic":
                self._log(asked.run_id, asked.seq, ident(operation))

    def _log(self, run_id: str, seq: int, name: str) -> None:
        self._world.logs[run_id].executed[seq] = name


LEASE_S = 1.0


class Machine:
    """A machine with an agent, which is started again when it was killed.

    Attributes:
        process: The agent's.
        life: The newest engine process of the agent.
        calls: Open calls of the agent.
        held: What the network holds back while it is cut; None while it carries.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self.address = name
        self.life: SimulatedLife | None = None
        self.calls: set[AgentCall] = set()
        self.held: deque[Callable[[], None]] | None = None
        self.start()

    def start(self) -> None:
        self.process = Process(self._world.loop, f"the agent of {self.name}", self)
        front: Any = self
        self.process.spawn(Agent(front, self.name, {}, Path("/unused")).run())

    def channel(self) -> Any:
        """As :meth:`.Front.channel`; its calls are :class:`SimulatedLending`."""
        return SimpleNamespace(close=_nothing)

    def fails(self, rng: random.Random) -> None:
        """Let something of it fail, and mend it after a while."""
        what = rng.choice(("engine", "agent", "agent stops", "machine stops", "network", "reset", "half open"))
        after, pause_s = self._world.network.after, rng.uniform(0, 2 * LEASE_S)
        self._world.note(f"{self.name} breaks: {what}, for {pause_s:.3f} s")
        if what == "engine" and self.life is not None:
            self.life.kill()
        elif what == "agent":
            self.process.kill()
            if self.life is not None:  # its parent is gone
                self.life.kill()
            for call in sorted(self.calls, key=lambda call: call.number):
                after(self._world.network.latency(), partial(call.broken, "the agent died"))
            after(pause_s, self.start)
        elif what in ("agent stops", "machine stops"):
            stopped = [self.process]
            if what == "machine stops" and self.life is not None:
                stopped.append(self.life.process)
            for process in stopped:
                process.stop()
                after(pause_s, process.go_on)
        elif what == "network" and self.held is None:
            self.held = deque()
            after(pause_s, partial(self._mend, rng.random() < 0.5))
        elif what in ("reset", "half open"):
            for call in sorted(self.calls, key=lambda call: call.number):
                call.reset(pause_s if what == "half open" else 0.0)

    def _mend(self, lossy: bool) -> None:
        held, self.held = self.held or deque(), None
        if lossy:
            for call in sorted(self.calls, key=lambda call: call.number):
                call.broken("the network was away for too long")
        for deliver in held:
            deliver()


class AgentCall(Call):
    """The call that lends an engine."""

    def __init__(self, world: World, machine: Machine) -> None:
        self._machine = machine
        machine.calls.add(self)
        super().__init__(world.network, self._attach)

    def _attach(self, service: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return EngineService(service._core).Attach(requests, SimpleNamespace(send_initial_metadata=_nothing))

    def reset(self, told_after_s: float) -> None:
        """End the call at the server now, and at the agent later."""
        if self._over or self._server is None:
            return
        self._ignores = True
        if self._server.process.alive and self._task is not None:
            self._task.cancel()
        self._network.after(told_after_s, partial(self.broken, "the connection was reset"))

    _ignores = False

    def server_died(self) -> None:
        told_after_s = self._network.world.rng.uniform(0, 2 * LEASE_S)
        self._network.after(told_after_s, partial(self.broken, "the server died"))

    def _begin(self, server: Any, handler: Any) -> None:
        if self._machine.held is not None:
            self._machine.held.append(partial(super()._begin, server, handler))
        else:
            super()._begin(server, handler)

    def _deliver(self, to: str, item: Any) -> None:
        if self._machine.held is not None:
            self._machine.held.append(partial(super()._deliver, to, item))
        elif not self._ignores:
            super()._deliver(to, item)

    def _failure(self, error: ServiceError) -> Exception:
        return error

    def _end(self) -> None:
        self._machine.calls.discard(self)
        super()._end()


class SimulatedLending:
    """Stand-in for :class:`.Lending`."""

    def __init__(
        self, channel: Any, front: Any, offer: engine_pb2.EngineOffer, on_lease: Callable[[int], None]
    ) -> None:
        machine: Machine = front
        self.link = ChunkedLink(self.read, on_lease)
        self._call = AgentCall(machine._world, machine)
        self._answers = aiter(self._call)
        self._writing = asyncio.create_task(self._write(offer))

    async def _write(self, offer: engine_pb2.EngineOffer) -> None:
        try:
            await self._call.write(engine_pb2.EngineChunk(offer=offer))
            async for chunk in self.link.chunks():
                await self._call.write(chunk)
            await self._call.done_writing()
        except asyncio.InvalidStateError:  # the reader is told
            pass

    async def read(self) -> engine_pb2.EngineChunk | None:
        try:
            chunk: engine_pb2.EngineChunk | None = await anext(self._answers, None)
        except ConnectionLostError as error:
            raise LinkClosed(str(error)) from error
        return chunk

    async def cancel(self) -> None:
        self._call.cancel()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)


class SimulatedLife:
    """Stand-in for :class:`.LocalLife`: an engine's process, as its agent sees it.

    Attributes:
        process: The engine's.
        engine: What it carries out.
        at_server: What its server has of it.
        staging: Folder without which it writes nothing, in the state folder of whichever server runs.
        marks: The part of the page of marks that an agent writes.
    """

    def __init__(self, world: World, staging: Path, lease_ns: int) -> None:
        server = world.server or world._booting
        assert server is not None
        self._world, self._server = world, server
        (self.at_server,) = (life for life in server.core.agents._lives if staging in life._folders)
        self.staging = staging.relative_to(world.disk.state_dir)
        self.marks = SimpleNamespace(lease_ns=lease_ns)
        self.process = Process(world.loop, "an engine")
        self.engine = FarEngine(world, self)
        self._requests: asyncio.Queue[tuple[engine_pb2.EngineRequest, bytes]] = asyncio.Queue()
        self._replies: asyncio.Queue[EngineAnswer | None] = asyncio.Queue()
        self._begun: dict[int, None] = {}
        self._withdrawn: set[int] = set()
        for work in (self._serve(), self._beat(), self._watch()):
            self.process.spawn(work)

    @property
    def counts(self) -> bool:
        """Whether its server lives and has not given it up."""
        return self._server.process.alive and not self.at_server.has_ended

    @property
    def is_given_up(self) -> bool:
        """Whether its server, or the one after it, has given its runs to others."""
        return self.at_server.has_ended if self._server.process.alive else self._world.server is not None

    # ---- the agent's side

    def send(self, request: engine_pb2.EngineRequest, payload: Sequence[Any]) -> None:
        sent = engine_pb2.EngineRequest.FromString(request.SerializeToString())
        self._requests.put_nowait((sent, b"".join(bytes(part) for part in payload)))

    async def receive(self) -> EngineAnswer:
        answer = await self._replies.get()
        if answer is None:
            raise LinkClosed("it ended")
        return answer

    def answered(self, request_id: int) -> None:
        self._begun.pop(request_id, None)

    async def withdraw(self, request_id: int) -> bool:
        if request_id in self._begun:
            return False
        self._withdrawn.add(request_id)
        return True

    def stop(self, request_id: int) -> bool:
        return False

    def suspects(self, unanswered: Sequence[int]) -> Collection[int]:
        return set(self._begun) or set(unanswered[:1])

    async def pulse(self) -> None:
        return None

    def kill(self) -> None:
        if self.process.alive:
            self.process.kill()
            self._replies.put_nowait(None)

    async def exited(self) -> None:
        return None

    async def end(self) -> str:
        self.kill()
        return "the simulated engine ended"

    def close(self) -> None:
        pass

    # ---- the engine's

    async def _serve(self) -> None:
        rng = self._world.rng
        await asyncio.sleep(rng.uniform(0, 0.2))
        self._replies.put_nowait((engine_pb2.EngineReply(hello=self.engine.hello), b""))
        while True:
            request, payload = await self._requests.get()
            reply, columns = engine_pb2.EngineReply(id=request.id), b""
            if request.HasField("shutdown"):
                self.kill()
                return
            if request.id in self._withdrawn:
                reply.not_started.SetInParent()
            else:
                self._begun[request.id] = None
                if rng.random() < (0.3 if request.operation.operation.HasField("save_checkpoint") else 0.01):
                    await asyncio.sleep(rng.uniform(0, LEASE_S))
                try:
                    await self.engine.work(request)
                    reply, columns = self.engine._carry_out(request, payload)
                except (EngineDied, Superseded):
                    self.kill()
                    return
                except ServiceError as error:
                    reply.error.CopyFrom(error.error)
                reply.id = request.id
            self._replies.put_nowait((reply, columns))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            beat = engine_pb2.EngineReply(heartbeat=engine_pb2.EngineHeartbeat())
            self._replies.put_nowait((beat, b""))

    async def _watch(self) -> None:
        """As :func:`.lease.watch`."""
        while (left := self.marks.lease_ns - lease.now_ns()) > 0:  # noqa: ASYNC110  a time, no event
            await asyncio.sleep(left / 1e9)
        self._world.note("an engine's lease ends")
        self.kill()


class FarEngine(SimulatedEngine):
    """What an engine on another machine carries out; its checkpoints get their places through the staging folder."""

    def __init__(self, world: World, life: SimulatedLife) -> None:
        super().__init__(world, 0)
        self._life = life
        self.hello.device = "far"

    def die(self) -> None:
        """Whoever carries out its requests ends the process."""

    def _log(self, run_id: str, seq: int, name: str) -> None:
        if self._life.counts:
            super()._log(run_id, seq, name)

    def _folder(self, path: str) -> Path:
        self.state_dir = self._world.disk.state_dir
        return super()._folder(path)

    @contextlib.contextmanager
    def _replacing(self, run_id: str, name: str, overwrite: bool) -> Iterator[Path]:
        state_dir = self._world.disk.state_dir
        store = FolderStore(state_dir, staging=state_dir / self._life.staging)
        with store.replacing(Place(f"runs/{run_id}", f"checkpoints/{name}")) as folder:
            yield folder
        if self._life.is_given_up:
            self._world.defects.append(f"an engine that was given up wrote {run_id}/{name}")


async def launched(settings: Any, number: int, engines: int, staging: Path, lease_ns: int) -> SimulatedLife:
    """Stand-in for :func:`.launch`."""
    machine = current_process().machine
    machine.life = SimulatedLife(machine._world, staging, lease_ns)
    return machine.life


def checked_end(world: World) -> Callable[[RemoteLife], Awaitable[str]]:
    """:meth:`.RemoteLife.end` that finds engines that outlive their lease."""
    real = RemoteLife.end

    async def end(given_up: RemoteLife) -> str:
        if given_up._how.startswith("nothing was heard"):
            lives = [machine.life for machine in world.machines if machine.life is not None]
            world.defects += [
                "an engine outlives its lease"
                for life in lives
                if life.at_server is given_up and life.process.alive and not life.process.is_stopped
            ]
        return await real(given_up)

    return end


async def _nothing(*_: Any) -> None:
    pass
