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
from gradwire_server.engine_link.frames import AsyncEngineLink, EngineLink, LinkClosed


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
        for number in range(3):
            link.send(request(number), [memoryview(payload).cast("B")])
        seen = []
        for _ in range(3):
            message, received = await link.receive(engine_pb2.EngineRequest)
            seen.append(message.id)
            assert np.array_equal(np.frombuffer(received, np.uint32), payload)
        assert seen == [0, 1, 2]
        with pytest.raises(LinkClosed):
            await link.receive(engine_pb2.EngineRequest)
        link.close()

    thread = threading.Thread(target=echo)
    thread.start()
    asyncio.run(talk())
    thread.join()


def test_frames_that_come_together_or_in_pieces_are_the_same() -> None:
    ends = socket.socketpair()
    sender, link = EngineLink(ends[0]), EngineLink(ends[1])
    rng = np.random.default_rng(1)
    sizes = [0, 1, 7, 60_000, 70_000, 0, 200_000, 3] * 3
    payloads = [rng.bytes(size) for size in sizes]

    def send() -> None:
        recorded, there = socket.socketpair()
        recorder = EngineLink(recorded)
        reader = threading.Thread(target=forward, args=(there,))
        reader.start()
        for number, payload in enumerate(payloads):
            recorder.send(request(number), [payload])
        recorder.close()
        reader.join()
        sender.close()

    def forward(source: socket.socket) -> None:
        while data := source.recv(int(rng.integers(1, 50_000))):
            ends[0].sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    for number, payload in enumerate(payloads):
        message, received = link.receive(engine_pb2.EngineRequest)
        assert message == request(number) and bytes(received) == payload
    with pytest.raises(LinkClosed):
        link.receive(engine_pb2.EngineRequest)
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
    code = "import sys, gradwire_server.engine_link.frames; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
