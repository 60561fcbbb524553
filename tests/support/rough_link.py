"""A TCP relay on loopback that delays, stalls, truncates and drops connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub

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
