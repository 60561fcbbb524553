"""Frames between the front and the engine over a socket pair.

``engine.proto`` describes the layout of a frame. Small frames are read in batches; large payloads are sent from the
caller's buffers without a copy and received directly into one buffer. This module needs no torch, because the front
imports it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<IQ")
_SMALL = 1 << 16
_MAX_SEGMENTS = 512
MAX_HEADER_BYTES = 64 << 20
"""Longest header in bytes; a longer one means that the stream is corrupt."""


class LinkClosed(ConnectionError):
    """The other end has closed the link, or the stream is corrupt."""


def segments(message: Message, buffers: Sequence[Buffer]) -> list[memoryview]:
    """The bytes of a frame; small ones in one piece."""
    header = message.SerializeToString()
    payload = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
    size = sum(view.nbytes for view in payload)
    start = _PREFIX.pack(len(header), size) + header
    if size <= _SMALL:
        return [memoryview(b"".join([start, *payload]))]
    return [memoryview(start), *payload]


class Incoming:
    """Buffer of a stream of frames.

    The reader receives into :meth:`room`, reports the byte count to :meth:`took`, and takes complete frames with
    :meth:`frame`.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_SMALL))
        self._begin = self._end = 0
        self._header: bytes | None = None
        self._payload = memoryview(b"")
        self._filled = 0

    def room(self) -> memoryview:
        """Buffer for the next bytes: the rest of a payload that did not arrive whole, or else the batch buffer."""
        if self._header is not None:
            return self._payload[self._filled :]
        rest = self._end - self._begin
        need = self._need()
        if len(self._buffer) - self._begin < max(need, _SMALL // 2):
            buffer = self._buffer if need <= len(self._buffer) else memoryview(bytearray(need))
            buffer[:rest] = self._buffer[self._begin : self._end]
            self._buffer, self._begin, self._end = buffer, 0, rest
        return self._buffer[self._end :]

    def took(self, count: int) -> None:
        """Count bytes that were received into :meth:`room`.

        Raises:
            LinkClosed: The count is 0: the stream has ended.
        """
        if not count:
            raise LinkClosed("the other end closed the link")
        if self._header is not None:
            self._filled += count
        else:
            self._end += count

    def frame(self, kind: type[M]) -> tuple[M, memoryview] | None:
        """The message and payload of the next frame if it is complete, else None. The payload has its own buffer.

        Raises:
            LinkClosed: The stream is corrupt.
        """
        if self._header is None:
            if self._end - self._begin < self._need():
                return None
            header_bytes, payload_bytes = _PREFIX.unpack_from(self._buffer, self._begin)
            start = self._begin + _PREFIX.size
            self._header = bytes(self._buffer[start : start + header_bytes])
            start += header_bytes
            there = min(self._end - start, payload_bytes)
            self._payload, self._filled = memoryview(bytearray(payload_bytes)), there
            self._payload[:there] = self._buffer[start : start + there]
            self._begin = start + there
        if self._filled < len(self._payload):
            return None
        message, payload = kind.FromString(self._header), self._payload
        self._header, self._payload = None, memoryview(b"")
        return message, payload

    def _need(self) -> int:
        """Bytes up to the end of the next header, or of its length prefix while that is incomplete."""
        if self._end - self._begin < _PREFIX.size:
            return _PREFIX.size
        header_bytes, _ = _PREFIX.unpack_from(self._buffer, self._begin)
        if header_bytes > MAX_HEADER_BYTES:
            raise LinkClosed(f"a frame announces a header of {header_bytes} bytes: the stream is out of step")
        return _PREFIX.size + int(header_bytes)


def _send_some(sock: socket.socket, pending: deque[memoryview]) -> None:
    """Send as much as one ``sendmsg`` takes, and leave the rest in ``pending``."""
    sent = sock.sendmsg([pending[index] for index in range(min(len(pending), _MAX_SEGMENTS))])
    while pending and sent >= pending[0].nbytes:
        sent -= pending.popleft().nbytes
    if sent:
        pending[0] = pending[0][sent:]


class EngineLink:
    """Blocking link for frames. One thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._sending = threading.Lock()
        self._incoming = Incoming()

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame whose payload is the concatenation of the buffers, each of them contiguous.

        Raises:
            LinkClosed: The other end has closed the link.
        """
        pending = deque(segments(message, buffers))
        with self._sending:
            try:
                while pending:
                    _send_some(self._sock, pending)
            except OSError as error:
                raise LinkClosed(str(error)) from error

    def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Receive the next frame: its message, and its payload in a buffer of its own.

        Raises:
            LinkClosed: The stream has ended or is corrupt.
        """
        while (frame := self._incoming.frame(kind)) is None:
            try:
                self._incoming.took(self._sock.recv_into(self._incoming.room()))
            except OSError as error:
                raise LinkClosed(str(error)) from error
        return frame

    def close(self) -> None:
        """Close the link; a thread that waits in :meth:`receive` gets LinkClosed."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class AsyncEngineLink:
    """Link for frames on an asyncio loop. Receive in one task only; a cancelled receive loses no data."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = Incoming()
        self._outgoing: deque[memoryview] = deque()
        self._more: asyncio.Future[None] | None = None
        self._reading = False
        self._closed: LinkClosed | None = None

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame like :meth:`EngineLink.send`, without waiting, with others of the same turn of the loop.

        Bytes that the socket does not take then are sent later, in order. If the other end has closed the link, only
        :meth:`receive` raises.
        """
        idle = not self._outgoing
        self._outgoing += segments(message, buffers)
        if idle:
            asyncio.get_running_loop().call_soon(self._flush_first)

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Receive the next frame; see :meth:`EngineLink.receive`."""
        loop = asyncio.get_running_loop()
        while (frame := self._incoming.frame(kind)) is None:
            if self._closed is not None:
                raise self._closed
            self._more = loop.create_future()
            if not self._reading:
                self._reading = True
                loop.add_reader(self._sock, self._read)
            await self._more
        return frame

    def _read(self) -> None:
        """Receive what is there, and go on watching the socket for as long as somebody waits for more.

        ``loop.sock_recv_into`` would begin and end the watch for every frame: two system calls each.
        """
        more = self._more
        if more is None or more.done():
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._sock)
            return
        try:
            self._incoming.took(self._sock.recv_into(self._incoming.room()))
        except BlockingIOError:
            return
        except LinkClosed as error:
            self._closed = error
        except OSError as error:
            self._closed = LinkClosed(str(error))
        more.set_result(None)

    def close(self) -> None:
        """Close the link; call it when no task is receiving. A second call does nothing."""
        if self._sock.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._outgoing.clear()
        self._sock.close()

    def _flush_first(self) -> None:
        self._flush()
        if self._outgoing:
            asyncio.get_running_loop().add_writer(self._sock, self._flush_rest)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                _send_some(self._sock, self._outgoing)
        except BlockingIOError:
            pass  # sent when the socket is writable again
        except OSError:
            self._outgoing.clear()

    def _flush_rest(self) -> None:
        self._flush()
        if not self._outgoing:
            asyncio.get_running_loop().remove_writer(self._sock)
