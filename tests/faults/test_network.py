"""A network that drops, truncates, stalls and delays; submissions that come twice, late and in any order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from support import program
from support.front import Client, Door
from support.stage import Stage

from tests.faults.conftest import COUNT, SETTINGS, Calm
from tests.faults.test_kills import compare

FRAMING = 10_000
"""Bytes of HTTP/2 around the list of losses, and of the calls before it."""
FAULTS = ("drop", "truncate", "stall", "delay")


@dataclass
class RoughLink:
    """A relay, and what it did: ``faults`` counts connections by what became of them.

    Each connection gets a fault and the number of bytes, of both directions, after which it strikes: *drop* resets
    the connection, *truncate* closes it, *stall* forwards nothing for a while and then resets it, *delay* holds every
    piece back for some milliseconds until then. The first connection may carry ``catalogue`` bytes besides: the list
    of losses has to come through in one piece.
    """

    address: str
    rng: random.Random
    largest: int
    catalogue: int
    faults: Counter[str] = field(default_factory=Counter)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.address.rsplit(":", 1)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        fault, left = self.rng.choice(FAULTS), [self.rng.randrange(self.largest)]
        left[0] += 0 if self.faults else self.catalogue
        self.faults[fault] += 1
        sides = ((reader, upstream_writer), (upstream_reader, writer))
        pipes = [asyncio.ensure_future(self._pipe(fault, left, *side)) for side in sides]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            for end in (writer, upstream_writer):
                if fault == "truncate":
                    with contextlib.suppress(OSError):
                        end.close()
                else:
                    end.transport.abort()

    async def _pipe(
        self, fault: str, left: list[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 14):
                if fault == "delay":
                    await asyncio.sleep(self.rng.uniform(0, 0.02))
                data, left[0] = data[: max(left[0], 0)], left[0] - len(data)
                writer.write(data)
                await writer.drain()
                if left[0] <= 0:
                    if fault == "stall":
                        await asyncio.sleep(self.rng.uniform(0.2, 2.0))
                    return


@contextlib.asynccontextmanager
async def rough_link(address: str, rng: random.Random, largest: int = 20_000) -> AsyncIterator[tuple[str, RoughLink]]:
    """Relay to ``address`` with faults; no connection but the first outlives ``largest`` bytes."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = TrainingServiceStub(channel)
        losses = await stub.ListLosses(pb.ListLossesRequest())
    link = RoughLink(address, rng, largest, losses.ByteSize() + FRAMING)
    carrying: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        task.add_done_callback(carrying.discard)
        await link.carry(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", link
    finally:
        server.close()
        for task in list(carrying):
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def over_a_rough_link(stage: Stage, rng: random.Random, calm: Calm) -> None:
    run_id = await asyncio.to_thread(stage.create, **SETTINGS)
    stage.out.unlink(missing_ok=True)
    async with rough_link(stage.server.address, rng) as (address, link):
        await asyncio.wait_for(program.main(address, run_id, calm.seed, calm.count, stage.out), 600)
    print(f"{sum(link.faults.values())} connections: {dict(link.faults)}")
    assert link.faults, "nothing went over the link"
    await asyncio.to_thread(compare, stage, run_id, calm)


@pytest.mark.long
async def test_a_rough_network_costs_nothing(
    stage: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    calm = await asyncio.to_thread(left_alone, seed, COUNT)
    await over_a_rough_link(stage, rng, calm)


@pytest.mark.faults
@pytest.mark.timeout(1200)
async def test_a_rough_network_costs_nothing_for_a_long_time(
    stage: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    calm = await asyncio.to_thread(left_alone, seed, 1000)
    await over_a_rough_link(stage, rng, calm)


async def submit_carelessly(door: Door, rng: random.Random, count: int) -> None:
    """Every operation twice at least, in any order, over several streams, some of which are cut off."""
    owner = await (await door.client()).begin()
    sent = 0
    todo = [seq for seq in range(1, count + 1) for _ in range(rng.randrange(2, 4))]
    rng.shuffle(todo)

    async def over_one_stream(numbers: list[int], cut: bool) -> None:
        nonlocal sent
        client = await door.client()
        client.run_id, client.epoch = owner.run_id, owner.epoch
        for seq in numbers:
            operation: dict[str, Any] = {"forward_backward": pb.LossCall(loss_fn=f"op-{seq}")}
            if seq % 3 == 0:
                operation = {"optim_step": pb.OptimStep(learning_rate=0.1)}
            await client.send(*client.frames(seq, b"" if seq % 3 == 0 else bytes([seq % 256]) * 1000, **operation))
            sent += 1
            if rng.random() < 0.2:
                await asyncio.sleep(rng.uniform(0, 0.02))
        if cut:
            client._stream.cancel()
        else:
            acks = [await client.ack() for _ in numbers]
            assert sorted(ack.seq for ack in acks) == sorted(numbers) and not any(ack.error.code for ack in acks)

    shares = [todo[i::6] for i in range(6)]
    await asyncio.gather(*(over_one_stream(share, cut) for share in shares for cut in (True, False)))
    results = await owner.results(count)
    assert [result.seq for result, _ in results] == list(range(1, count + 1))
    assert {result.status for result, _ in results} == {pb.STATUS_SUCCEEDED}
    expected = ["step" if seq % 3 == 0 else f"op-{seq}" for seq in range(1, count + 1)]
    assert door.engine.runs[owner.run_id].history == expected
    print(f"{sent} submissions of {count} operations, shuffled, half of the streams cut off: each carried out once")


@pytest.mark.long
async def test_submissions_that_come_twice_late_and_in_any_order_count_once(start: Any, rng: random.Random) -> None:
    async with start() as door:
        await submit_carelessly(door, rng, 300)


@pytest.mark.faults
async def test_many_submissions_that_come_twice_late_and_in_any_order_count_once(
    start: Any, rng: random.Random
) -> None:
    for _ in range(10):
        async with start() as door:
            await submit_carelessly(door, rng, 900)


@pytest.mark.parametrize("cut", range(3))
async def test_an_operation_cut_off_in_its_payload_leaves_nothing(start: Any, cut: int, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        frames = client.frames(1, bytes(3 << 20), forward_backward=pb.LossCall(loss_fn="a"))
        await client.send(*frames[:cut])
        client._stream and client._stream.cancel()
        again: Client = await door.client()
        again.run_id, again.epoch = client.run_id, client.epoch
        await again.fb(1, "b", b"other")
        assert await again.statuses(1) == ["ok"]
        assert door.engine.runs[client.run_id].history == ["b"]
