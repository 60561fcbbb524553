"""Frames between the front and the engine, over a socket pair.

The layout of a frame is described in ``engine.proto``. Payloads are scattered straight from the caller's buffers
into the socket and gathered straight into one buffer at the other end. Nothing here needs torch: the front
imports this module too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<IQ")
_SMALL = 1 << 16
_MAX_SEGMENTS = 512
MAX_HEADER_BYTES = 64 << 20
"""A header longer than this is taken for a broken stream."""


class LinkClosed(ConnectionError):
    """The other end is gone."""


def _segments(message: Message, buffers: Sequence[Buffer]) -> list[memoryview]:
    header = message.SerializeToString()
    payload = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
    size = sum(view.nbytes for view in payload)
    start = _PREFIX.pack(len(header), size) + header
    if size <= _SMALL:
        return [memoryview(b"".join([start, *payload]))]
    return [memoryview(start), *payload]


def _read_prefix(prefix: memoryview) -> tuple[int, int]:
    header_bytes, payload_bytes = _PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES:
        raise LinkClosed(f"a frame announces a header of {header_bytes} bytes: the stream is out of step")
    return header_bytes, payload_bytes


class EngineLink:
    """Blocking frames. One thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Sends a frame whose payload is these contiguous buffers, one after the other.

        Raises:
            LinkClosed: when the other end is gone.
        """
        pending = _segments(message, buffers)
        with self._sending:
            try:
                while pending:
                    sent = self._sock.sendmsg(pending[:_MAX_SEGMENTS])
                    while pending and sent >= pending[0].nbytes:
                        sent -= pending.pop(0).nbytes
                    if sent:
                        pending[0] = pending[0][sent:]
            except OSError as error:
                raise LinkClosed(str(error)) from error

    def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """The next frame: its message, and its payload in a buffer of its own.

        Raises:
            LinkClosed: at the end of the stream.
        """
        header_bytes, payload_bytes = _read_prefix(self._read(_PREFIX.size))
        message = kind.FromString(bytes(self._read(header_bytes)))
        return message, self._read(payload_bytes)

    def close(self) -> None:
        """Ends the stream; a thread that waits in :meth:`receive` gets LinkClosed."""
        with contextlib.suppress(OSError):  # the other end was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, size: int) -> memoryview:
        view = memoryview(bytearray(size))
        done = 0
        while done < size:
            try:
                count = self._sock.recv_into(view[done:])
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not count:
                raise LinkClosed("the other end closed the link")
            done += count
        return view


class AsyncEngineLink:
    """The same frames on an asyncio loop.

    One task receives; any number send. A send or receive that is cancelled half-way leaves the stream out of step,
    so run them in tasks that live as long as the link.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._sending = asyncio.Lock()

    async def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """As :meth:`EngineLink.send`."""
        loop = asyncio.get_running_loop()
        async with self._sending:
            try:
                for segment in _segments(message, buffers):
                    await loop.sock_sendall(self._sock, segment)
            except OSError as error:
                raise LinkClosed(str(error)) from error

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """As :meth:`EngineLink.receive`."""
        header_bytes, payload_bytes = _read_prefix(await self._read(_PREFIX.size))
        message = kind.FromString(bytes(await self._read(header_bytes)))
        return message, await self._read(payload_bytes)

    def close(self) -> None:
        """Ends the stream; call it once no task sends or receives."""
        self._sock.close()

    async def _read(self, size: int) -> memoryview:
        loop = asyncio.get_running_loop()
        view = memoryview(bytearray(size))
        done = 0
        while done < size:
            try:
                count = await loop.sock_recv_into(self._sock, view[done:])
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not count:
                raise LinkClosed("the other end closed the link")
            done += count
        return view
