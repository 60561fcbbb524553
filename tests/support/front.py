"""A real grpc.aio server over a fake engine, and a small client of raw stubs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from gradwire_server.config import ServerConfig
from gradwire_server.limits import Limits
from gradwire_server.server import Server

from support.blocking import DETECTOR
from support.fake_engine import FakeEngine
from support.keyed import code_of


class Client:
    """One Submit stream, one Results stream, the unary calls as they are."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = TrainingServiceStub(channel)
        self.run_id, self.epoch, self.upload_id = "", 0, ""
        self.acks: dict[int, list[pb.SubmitAck]] = {}
        self.patience_s = 60.0
        self._stream: Any = None

    async def begin(self, **config: Any) -> Client:
        run = await self.stub.CreateRun(pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny", **config)))
        return await self.open(run.run_id)

    async def open(self, run_id: str, writer: str = "me", takeover: bool = False) -> Client:
        self.run_id = run_id
        opened = await self.stub.OpenRun(pb.OpenRunRequest(run_id=run_id, writer=writer, takeover=takeover))
        self.epoch = opened.epoch
        return self

    def frames(self, seq: int, payload: bytes = b"", **header: Any) -> list[pb.SubmitFrame]:
        tensors = header.pop("tensors", [pb.TensorSpec(name="x", dtype=pb.DTYPE_UINT8, shape=[1, len(payload)])])
        epoch, digest = header.pop("epoch", self.epoch), header.pop("digest", codec.digest([payload]))
        seen = header.pop("failure_seen", 0)
        head = pb.OperationHeader(
            run_id=self.run_id, epoch=epoch, seq=seq, operation=pb.Operation(**header), payload_bytes=len(payload),
            payload_digest=digest, tensors=tensors if payload else [], failure_seen=seen,
        )  # fmt: skip
        chunks = [payload[i : i + (1 << 20)] for i in range(0, len(payload), 1 << 20)] or [b""]
        return [pb.SubmitFrame(header=head, chunk=chunks[0]), *(pb.SubmitFrame(chunk=chunk) for chunk in chunks[1:])]

    async def send(self, *frames: pb.SubmitFrame) -> None:
        """Writes frames on the stream of this client, which is opened when it is needed."""
        if self._stream is None:
            self._stream = self.stub.Submit()
        for frame in frames:
            await self._stream.write(frame)

    async def ack(self, timeout: float | None = None) -> pb.SubmitAck:
        return await asyncio.wait_for(self._stream.read(), timeout or self.patience_s)

    async def submit(self, seq: int, payload: bytes = b"", **header: Any) -> pb.SubmitAck:
        """Sends an operation and waits for its acknowledgement."""
        await self.send(*self.frames(seq, payload, **header))
        return await self.ack()

    async def fb(self, seq: int, loss_fn: str = "a", payload: bytes = b"", **header: Any) -> pb.SubmitAck:
        return await self.submit(seq, payload, forward_backward=pb.LossCall(loss_fn=loss_fn), **header)

    async def step(self, seq: int, **header: Any) -> pb.SubmitAck:
        return await self.submit(seq, optim_step=pb.OptimStep(learning_rate=0.1), **header)

    async def results(self, count: int, from_seq: int = 1) -> list[tuple[pb.OperationResult, bytes]]:
        """So many results from a number on, each with its payload."""
        call = self.stub.Results(pb.ResultsRequest(run_id=self.run_id, from_seq=from_seq))
        found: list[tuple[pb.OperationResult, bytes]] = []
        try:
            while len(found) < count or len(found[-1][1]) < found[-1][0].payload_bytes:
                frame = await asyncio.wait_for(call.read(), self.patience_s)
                if frame.HasField("header"):
                    found.append((frame.header, frame.chunk))
                else:
                    found[-1] = (found[-1][0], found[-1][1] + frame.chunk)
        finally:
            call.cancel()
        return found

    async def statuses(self, count: int, from_seq: int = 1) -> list[str]:
        return [describe(result) for result, _ in await self.results(count, from_seq)]


def describe(result: pb.OperationResult) -> str:
    """ "ok", or the error's code, with what caused it."""
    if result.status == pb.STATUS_SUCCEEDED:
        return "ok"
    cause = f"({result.error.cause_seq})" if result.error.cause_seq else ""
    return code_of(result.error) + cause


class Door:
    """A running server, its engines of which ``engine`` is the first, and clients of it."""

    def __init__(self, server: Server, engines: list[FakeEngine], stack: AsyncExitStack) -> None:
        self.server, self.engines, self._stack = server, engines, stack

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    async def client(self) -> Client:
        return Client(await self._stack.enter_async_context(grpc.aio.insecure_channel(self.server.address)))


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`async with start(limits={...}, engines=2) as door`: may be entered again on the same state folder."""

    @asynccontextmanager
    async def run(
        limits: dict[str, int] | None = None,
        prepare: Callable[[FakeEngine], None] = lambda engine: None,
        engines: int = 1,
        **settings: Any,
    ) -> AsyncIterator[Door]:
        config = ServerConfig(
            address="127.0.0.1:0", state_dir=tmp_path, models={"tiny": "/models/tiny"},
            limits=Limits.model_validate(limits or {}), **{"grace": 2, "engines": min(engines, 1)} | settings,
        )  # fmt: skip
        running = [FakeEngine(tmp_path, number) for number in range(engines)]
        for engine in running:
            prepare(engine)
        with DETECTOR.excused():  # the HTTP door imports FastAPI
            server = Server(config, running)
        try:
            async with AsyncExitStack() as clients, server:
                yield Door(server, running, clients)
        finally:
            for engine in running:
                await engine.close()

    return run


@pytest.fixture
async def door(start: Start) -> AsyncIterator[Door]:
    async with start() as door:
        yield door
