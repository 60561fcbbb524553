"""One simulation: clients that train, a server that is killed, a network and a disk that fail; all from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gradwire.errors import GradwireError, ResultReleasedError, WriterError
from gradwire.futures import Future
from gradwire.results import Columns
from gradwire.wire.entries import Request
from gradwire.wire.link import RunLink
from gradwire.wire.queue import OperationQueue
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.agent import agent
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.doors.grpc.service import TrainingService
from gradwire_server.engine_client.remote import RemoteLife
from gradwire_server.engine_link import lease
from gradwire_server.errors import ServiceError
from gradwire_server.journal import database, journal
from gradwire_server.journal.run_row import RunRecord

from support.simulation.agents import LEASE_S, Machine, SimulatedEngine, SimulatedLending, checked_end, launched
from support.simulation.checker import Outcome, RunLog, check, ident
from support.simulation.disk import THREADS, Disk, SimulatedDatabase
from support.simulation.loop import Process, SimulatedLoop
from support.simulation.network import Call, Network, SimulatedTransport

HOURS = 3600.0
WINDOW = 8
"""Operations that a client is ahead of what it has seen."""


class SimulatedServer:
    """The core and its door in a process of their own."""

    def __init__(self, world: World, count: int) -> None:
        self.process = Process(world.loop, f"server {count}")
        self.engines = [SimulatedEngine(world, number) for number in range(world.engines)]
        self.calls: set[Call] = set()
        config = ServerConfig(
            address="127.0.0.1:0", state_dir=world.disk.state_dir, models={"tiny": "/models/tiny"},
            checkpoint_every_steps=3, grace=1, engine_lease=LEASE_S,
        )  # fmt: skip
        self.core = Core(config, self.engines)
        self.service = TrainingService(self.core)

    def die(self) -> None:
        self.process.kill()
        self.core.folder_lock.release()  # the kernel does this for a real process


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector from finalizing abandoned generators and coroutines at a moment that no seed decides.

    What an earlier simulation left is collected first.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class World:
    """A simulation.

    Args:
        seed: Decides everything.
        folder: An empty folder, best in memory.
        operations: Number of operations of each client.
        writers: Clients that write to the one run and take it from each other.
        engines: Number of engines; those of several end for a while, and the run moves between them.
        machines: Number of other machines with an engine each, to which the run also moves.

    Attributes:
        defects: What was found, in sentences.
        trace: What happened and when, equal for equal seeds.
        servers: Number of servers that were started.
        moves: Number of times that the run moved because it was told to.
        accepted: Number of operations that the run has in the end.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        operations: int = 25,
        writers: int | None = None,
        engines: int = 1,
        machines: int = 0,
    ) -> None:
        self.rng, self.engines = random.Random(seed), engines
        self.loop = SimulatedLoop(self.rng)
        self.disk = Disk(folder, self.rng, self._crash)
        self.network = Network(self)
        self.server: SimulatedServer | None = None
        self._booting: SimulatedServer | None = None
        self.logs: dict[str, RunLog] = defaultdict(RunLog)
        self.defects: list[str] = []
        self.trace: list[str] = []
        self._operations = operations
        self._writers = writers or self.rng.choice((1, 1, 1, 2))
        self.servers = self.accepted = self.moves = self._numbers = 0
        self._quiet = False
        self._num_machines = machines
        self.machines: list[Machine] = []
        self._clients: dict[int, Process] = {}
        self._programs: dict[int, asyncio.Future[None]] = {}

    def run(self) -> list[str]:
        """Run the simulation to its end.

        Returns:
            What is wrong; nothing if all is right.
        """
        with _without_collector(), self._simulated():
            try:
                self.loop.run_until_complete(asyncio.wait_for(self._main(), 10 * HOURS))
            except (Exception, SystemExit) as error:
                self.defects.append(f"the simulation ended with {error!r}")
            finally:
                self._clean_up()
        return self.defects

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        state = random.getstate()
        random.seed(self.rng.getrandbits(32))  # the SDK's backoff draws from it
        SimulatedDatabase.disk, SimulatedDatabase.rng = self.disk, self.rng
        with (
            mock.patch.object(time, "time", self.loop.unix_time),
            mock.patch.object(time, "monotonic", self.loop.time),
            mock.patch.object(os, "fsync", self.disk.fsync),
            mock.patch.object(database, "threading", THREADS),
            mock.patch.object(journal, "Database", SimulatedDatabase),
            mock.patch.object(lease, "now_ns", lambda: int(self.loop.unix_time() * 1e9)),
            mock.patch.object(agent, "Lending", SimulatedLending),
            mock.patch.object(agent, "launch", launched),
            mock.patch.object(RemoteLife, "end", checked_end(self)),
            mock.patch.object(agent.LocalLauncher, "pauses_s", (0.0, 0.05, 0.2, 0.5)),
        ):
            try:
                yield
            finally:
                random.setstate(state)

    def _clean_up(self) -> None:
        self.network.break_probability = self.disk.crash_in_commit = 0.0
        self.loop.finish()
        self.disk.close_files()

    def numbered(self) -> int:
        """Return a number that is unique in this simulation."""
        self._numbers += 1
        return self._numbers

    def note(self, what: str) -> None:
        self.trace.append(f"{self.loop.time():.6f} {what}")

    # ---- what happens

    async def _main(self) -> None:
        await self._start_server()
        self.machines = [Machine(self, f"machine {number}") for number in range(self._num_machines)]
        transport = SimulatedTransport(self.network, HOURS)
        request = pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny"), idempotency_key="the run")
        run = await transport.unary(lambda stub: stub.CreateRun, request)
        self.network.break_probability = self.rng.choice((0.0, 0.01, 0.05))
        for number in range(self._writers):
            self._start_client(number, run.run_id)
        chaos = self.loop.create_task(self._chaos(run.run_id))
        moving = self.loop.create_task(self._move(run.run_id)) if self.engines + self._num_machines > 1 else None
        try:
            async with asyncio.timeout(2 * HOURS):
                while self._programs:
                    await asyncio.wait(list(self._programs.values()), return_when=asyncio.FIRST_COMPLETED)
                    for number, ended in list(self._programs.items()):
                        if ended.done():
                            ended.result()
                            del self._programs[number]
                await chaos
                if moving is not None:
                    await moving
        except TimeoutError:
            self.defects.append(f"clients {sorted(self._programs)} wait for ever")
            self._note_what_waits()
            return
        await self._judge(run.run_id)

    def _note_what_waits(self) -> None:
        """Note every unfinished task with the line at which it waits."""
        for task in self.loop.tasks:
            if not task.done():
                lines = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in task.get_stack()]
                self.note(f"{task.get_name()} waits: {' < '.join(reversed(lines))}; for {task._fut_waiter!r}")  # type: ignore[attr-defined]

    async def _chaos(self, run_id: str) -> None:
        """Break things for a while, then let everything recover."""
        choices = ["server", "server", "commit", "client", "engine", "network", "disk", *4 * ["machine"]]
        if not self.machines:
            choices = choices[:-4]
        for _ in range(self.rng.randrange(6 + 3 * len(self.machines))):
            await asyncio.sleep(self.rng.expovariate(1 / 0.3))
            what = self.rng.choice(choices)
            self.note(f"break: {what}")
            if what == "server":
                self._crash()
            elif what == "commit":
                self.disk.crash_in_commit = 0.3
            elif what == "client" and self._programs:
                number = self.rng.choice(sorted(self._programs))
                self._clients[number].kill()
                await asyncio.sleep(self.rng.uniform(0, 1))
                self._start_client(number, run_id)
            elif what == "engine" and self.server is not None:
                self.rng.choice(self.server.engines).death_probability = 0.2
            elif what == "network" and self.server is not None:
                for call in self._open_calls(self.server):
                    call.broken("the network is gone")
            elif what == "machine":
                self.rng.choice(self.machines).fails(self.rng)
            elif what == "disk":
                self.disk.full = True
                await asyncio.sleep(self.rng.uniform(0, 3))
                self.disk.full = False
        await asyncio.sleep(self.rng.uniform(0, 1))
        self.network.break_probability = self.disk.crash_in_commit = 0.0
        for engine in self.server.engines if self.server is not None else ():
            engine.death_probability = 0.0
        self._quiet = True

    async def _move(self, run_id: str) -> None:
        """Move the run, and end and begin engines, until nothing breaks any more."""
        while not self._quiet:
            await asyncio.sleep(self.rng.expovariate(1 / 0.1))
            server = self.server
            record = server.core.storage.records.find(run_id) if server is not None else None
            if server is None or record is None:
                continue
            engine = self.rng.choice(server.core.engines.engines)
            if engine.is_ready and self.rng.random() < 0.8:
                self.note(f"the run moves to engine {engine.number}")
                server.process.spawn(self._moved(server, record, engine.number))
            elif engine.is_ready and isinstance(engine, SimulatedEngine):
                self.note(f"engine {engine.number} ends")
                engine.end()
                self.network.after(self.rng.uniform(0, 1), engine.begin)

    async def _moved(self, server: SimulatedServer, record: RunRecord, number: int) -> None:
        with contextlib.suppress(ServiceError):  # the run or its server ends
            await server.core.scheduler.move(record, number)
            self.moves += 1

    def _open_calls(self, server: SimulatedServer) -> list[Call]:
        return sorted(server.calls, key=lambda call: call.number)

    def _crash(self) -> None:
        """Kill the server's machine; another starts with what the disk holds."""
        server, self.server, self._booting = self.server or self._booting, None, None
        if server is None:
            return
        self.note("the server dies")
        self.disk.crash_in_commit = 0.0
        server.die()
        self.disk.lose_power()
        for run_id, accepted in self.disk.accepted().items():  # the engine may have begun what was not on disk yet
            for number in [number for number in self.logs[run_id].executed if number > accepted]:
                del self.logs[run_id].executed[number]
        for call in self._open_calls(server):
            call.server_died()
        self.network.after(self.rng.uniform(0, 2), lambda: self._restarting(self._start_server()))

    def _restarting(self, start: Any) -> None:
        task = self.loop.create_task(start)
        task.add_done_callback(self._restarted)

    def _restarted(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.defects.append(f"the server did not start: {error!r}")

    async def _start_server(self) -> None:
        if self.server is not None or self._booting is not None:
            return
        self.servers += 1
        server = self._booting = SimulatedServer(self, self.servers)
        try:
            await server.process.spawn(server.core.start())  # for ever, if it dies meanwhile
        except ServiceError as error:
            if error.code != pb.ERROR_CODE_STORAGE_FULL:
                raise
            server.die()  # it ended with a sentence, and is started again
            self._booting = None
            self.network.after(1.0, lambda: self._restarting(self._start_server()))
            return
        self.server, self._booting = server, None
        self.note("a server is up")

    def _start_client(self, number: int, run_id: str) -> None:
        ended: asyncio.Future[None] = self._programs.setdefault(number, self.loop.create_future())
        process = self._clients[number] = Process(self.loop, f"client {number}")
        task = process.spawn(Program(self, number, run_id, self._operations).run())

        def end(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and not ended.done():
                error = done.exception()
                if error is not None:
                    ended.set_exception(error)
                else:
                    ended.set_result(None)

        task.add_done_callback(end)

    async def _judge(self, run_id: str) -> None:
        """Wait until the server is idle, and compare."""
        while self.server is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        transport = SimulatedTransport(self.network, HOURS)
        deadline = self.loop.time() + HOURS
        while True:
            run = await transport.unary(lambda stub: stub.GetRun, pb.GetRunRequest(run_id=run_id))
            if run.applied_seq == run.accepted_seq or self.loop.time() > deadline:
                break
            await asyncio.sleep(1)
        log, self.accepted = self.logs[run_id], int(run.accepted_seq)
        history = await self._history(transport, run_id)
        self.defects += check(log, run.accepted_seq, run.applied_seq, self.disk.trimmed(run_id), history)
        self.defects += self.loop.complaints
        self.note(f"{run.accepted_seq} operations, {self.servers} servers, {self.disk.commits} commits")

    async def _history(self, transport: SimulatedTransport, run_id: str) -> list[str]:
        """Return the run's state, restored in the engine by one more operation."""
        link = RunLink(run_id, self.loop, transport)
        await link.open()
        for _ in range(100):
            request = Request.of(pb.Operation(zero_grad=pb.ZeroGrad()))
            await link.queue.submit("zero_grad", partial(_itself, request), lambda result, columns: None)
            if len(holders := self._holders(run_id)) == 1:
                break
            await asyncio.sleep(1)  # another machine has yet to hear that it was to drop the run, or a lease has ended
        else:
            self.defects.append(f"the run is on {len(holders)} engines")
        return list(holders[0].runs[run_id].history)

    def _holders(self, run_id: str) -> list[SimulatedEngine]:
        """The engines that have the run, but for those that the server has given up."""
        assert self.server is not None
        far = [machine.life for machine in self.machines if machine.life is not None]
        engines = [*self.server.engines, *(life.engine for life in far if life.process.alive and life.counts)]
        return [engine for engine in engines if run_id in engine.runs]

    # ---- what is observed

    def watched(self, call: Call) -> Call:
        """Wrap a Submit call so that what it sends and receives is recorded."""
        sent: dict[int, pb.OperationHeader] = {}
        write, answers = call.write, call.answers

        async def written(frame: pb.SubmitFrame) -> None:
            for each in (frame, *frame.more):
                if each.HasField("header"):
                    header = pb.OperationHeader()
                    header.CopyFrom(each.header)
                    sent[header.seq] = header
                    if header.operation.WhichOneof("kind") != "zero_grad":
                        log, name = self.logs[header.run_id], ident(header.operation)
                        log.sent[header.seq][name] = header
                        log.epochs[name].add(header.epoch)
            await write(frame)

        async def read() -> Any:
            async for answer in answers():
                for ack in (answer, *answer.more):
                    header = sent.get(ack.seq)
                    if header is None or ack.HasField("error"):
                        continue
                    if header.operation.WhichOneof("kind") != "zero_grad":
                        self.logs[header.run_id].acknowledged[ack.seq].add(ident(header.operation))
                yield answer

        call.write = written  # type: ignore[method-assign]
        call.answers = read
        return call


class Program:
    """A user's training program, which is restarted after a kill."""

    def __init__(self, world: World, number: int, run_id: str, operations: int) -> None:
        self._world, self._number, self._run_id = world, number, run_id
        self._operations = operations
        self._rng = random.Random(world.rng.getrandbits(32))

    async def run(self) -> None:
        """Submit operations until the run has the planned number, whoever submitted them."""
        world = self._world
        total = self._operations * world._writers
        while True:
            link = RunLink(self._run_id, world.loop, SimulatedTransport(world.network, 10 * HOURS))
            try:
                adopted = await link.adopt(_value)
                for seq, future in adopted.items():
                    await self._observe(seq, future, "")
                if await self._submit_all(link.queue, total):
                    return
            except WriterError:
                pass
            world.note(f"client {self._number} lost the run")
            await asyncio.sleep(self._rng.expovariate(1 / 0.5))

    async def _submit_all(self, queue: OperationQueue, total: int) -> bool:
        """Submit the rest; return whether the run is complete, False if another client took it over."""
        waiting: list[tuple[int, Future[Any], str]] = []
        fenced = False
        while queue.base + queue.last_index < total and not fenced:
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.expovariate(1 / 0.1))
            operation = self._operation()
            name = ident(operation)
            request = Request.of(operation, _payload(operation))
            before = queue.last_index
            future = queue.submit("operation", partial(_itself, request), _value)
            if queue.last_index > before:
                waiting.append((queue.base + queue.last_index, future, name))
                if self._rng.random() < 0.05:
                    self._world.logs[self._run_id].cancelling.add(name)
                    future.cancel()
            else:
                fenced = True
            while len(waiting) > WINDOW:
                fenced |= not await self._observe(*waiting.pop(0))
        for each in waiting:
            fenced |= not await self._observe(*each)
        return not fenced

    def _operation(self) -> pb.Operation:
        world = self._world
        count = world.numbered()
        kind = self._rng.choices(("fb", "step", "forward", "fail", "die", "save"), (55, 22, 8, 5, 2, 8))[0]
        if kind == "step":
            return pb.Operation(optim_step=pb.OptimStep(learning_rate=count))
        if kind == "forward":
            return pb.Operation(forward=pb.LossCall(loss_fn=f"forward-{count}"))
        if kind == "save":
            return pb.Operation(save_checkpoint=pb.SaveCheckpoint(name="last", note=str(count), overwrite=True))
        loss_fn = {"fail": "fail", "die": "die", "fb": ""}[kind]
        return pb.Operation(forward_backward=pb.LossCall(loss_fn=f"{loss_fn}-{count}"))

    async def _observe(self, seq: int, future: Future[Any], name: str) -> bool:
        """Wait for an operation; return whether it was accepted."""
        log = self._world.logs[self._run_id]
        try:
            outcome: Outcome = ("ok", await future)
        except ResultReleasedError:  # carried out; another client has the result
            return True
        except WriterError as error:
            if name:
                log.refused.add(name)
                self._world.note(f"{name} refused: {type(error).__name__}")
                return False
            raise
        except GradwireError as error:
            outcome = (type(error).__name__, 0.0)
        self._world.note(f"{seq} {name}: {outcome}")
        log.outcomes[seq].add(outcome)
        return True


def _payload(operation: pb.Operation) -> dict[str, Column] | None:
    """Return tensors that identify their operation."""
    if operation.WhichOneof("kind") != "forward_backward":
        return None
    return {"x": Column.from_rows([np.frombuffer(ident(operation).encode(), np.uint8)])}


def _itself(request: Request) -> Request:
    return request


def _value(result: pb.OperationResult, columns: Columns) -> float:
    """The number that an operation's result carries."""
    kind = result.WhichOneof("kind")
    if kind == "loss":
        return result.loss.loss
    if kind == "optim_step":
        return float(result.optim_step.step)
    if kind == "checkpoint":
        return float(result.checkpoint.seq)
    return 0.0
