"""Frames over a socket pair, blocking and asyncio."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_server.engine.link import AsyncEngineLink, EngineLink, LinkClosed


def request(number: int) -> engine_pb2.EngineRequest:
    return engine_pb2.EngineRequest(id=number, drop_run=engine_pb2.EngineDropRun(run_id=f"run-{number}"))


def test_frames_keep_their_order_and_payloads_of_any_size() -> None:
    ends = socket.socketpair()
    here, there = EngineLink(ends[0]), EngineLink(ends[1])
    big = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8)
    payloads: list[list[bytes | memoryview]] = [[], [b"abc", b"", b"def"], [memoryview(big), b"tail"], [b"x"] * 1500]
    payloads[3].append(bytes(1 << 17))

    def send() -> None:
        for number, buffers in enumerate(payloads):
            here.send(request(number), buffers)
        here.close()

    sender = threading.Thread(target=send)
    sender.start()
    for number, buffers in enumerate(payloads):
        message, payload = there.receive(engine_pb2.EngineRequest)
        assert message == request(number)
        assert bytes(payload) == b"".join(bytes(buffer) for buffer in buffers)
    with pytest.raises(LinkClosed):
        there.receive(engine_pb2.EngineRequest)
    sender.join()


def test_an_asyncio_end_speaks_with_a_blocking_end() -> None:
    ends = socket.socketpair()
    blocking = EngineLink(ends[1])
    payload = np.arange(1 << 20, dtype=np.uint32)

    def echo() -> None:
        for _ in range(3):
            message, received = blocking.receive(engine_pb2.EngineRequest)
            blocking.send(message, [received])
        blocking.close()

    async def talk() -> None:
        link = AsyncEngineLink(ends[0])
        sends = [link.send(request(number), [memoryview(payload).cast("B")]) for number in range(3)]
        sending = asyncio.gather(*sends)
        seen = []
        for _ in range(3):
            message, received = await link.receive(engine_pb2.EngineRequest)
            seen.append(message.id)
            assert np.array_equal(np.frombuffer(received, np.uint32), payload)
        await sending
        assert sorted(seen) == [0, 1, 2]
        with pytest.raises(LinkClosed):
            await link.receive(engine_pb2.EngineRequest)
        link.close()

    thread = threading.Thread(target=echo)
    thread.start()
    asyncio.run(talk())
    thread.join()


def test_a_broken_stream_is_noticed() -> None:
    ends = socket.socketpair()
    link = EngineLink(ends[0])
    ends[1].sendall(b"\xff" * 64)
    with pytest.raises(LinkClosed, match="out of step"):
        link.receive(engine_pb2.EngineRequest)
    ends[1].close()
    link.close()


def test_the_link_needs_no_torch() -> None:
    code = "import sys, gradwire_server.engine.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
