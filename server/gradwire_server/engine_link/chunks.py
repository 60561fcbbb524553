"""Frames as the chunks of a stream that carries whole messages, between a server and an agent on another machine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from google.protobuf.message import Message
from gradwire_proto.v1.engine_pb2 import EngineChunk

from gradwire_server.engine_link.frames import Buffer, Incoming, LinkClosed, M, segments

CHUNK_BYTES = 1 << 20
"""Most bytes of frames in a chunk."""
ADMITTED = "gradwire-admitted"
"""Metadata with which the server begins to answer an agent whose key may lend engines."""


class ChunkedLink:
    """Link for frames on an asyncio loop. Receive in one task only.

    Args:
        read: Returns the next chunk, None at the end of the stream.
        on_lease: Takes the number of a chunk about the lease.
    """

    def __init__(self, read: Callable[[], Awaitable[EngineChunk | None]], on_lease: Callable[[int], None]) -> None:
        self._read, self._on_lease = read, on_lease
        self._incoming = Incoming()
        self._data = memoryview(b"")
        self._outgoing: deque[memoryview] = deque()
        self._first: deque[EngineChunk] = deque()
        self._more = asyncio.Event()
        self._ends = False

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame without waiting; bytes that the stream does not take now are sent later, in order."""
        self._outgoing += segments(message, buffers)
        self._more.set()

    def send_first(self, chunk: EngineChunk) -> None:
        """Send a chunk of no frame, before whatever waits."""
        self._first.append(chunk)
        self._more.set()

    def end(self) -> None:
        """Send what waits, and nothing more."""
        self._ends = True
        self._more.set()

    async def receive(self, kind: type[M]) -> tuple[M, memoryview]:
        """Receive the next frame; see :meth:`.EngineLink.receive`."""
        while (frame := self._incoming.frame(kind)) is None:
            if not self._data:
                chunk = await self._read()
                if chunk is None:
                    raise LinkClosed("the other end closed the link")
                if chunk.lease:
                    self._on_lease(chunk.lease)
                self._data = memoryview(chunk.data)
                continue
            room = self._incoming.room()
            count = min(len(room), len(self._data))
            room[:count] = self._data[:count]
            self._data = self._data[count:]
            self._incoming.took(count)
        return frame

    async def chunks(self) -> AsyncIterator[EngineChunk]:
        """Yield the chunks to send, until :meth:`end`."""
        while True:
            while self._first or self._outgoing:
                yield self._first.popleft() if self._first else EngineChunk(data=self._next())
            if self._ends:
                return
            self._more.clear()
            await self._more.wait()

    def _next(self) -> bytes:
        parts, size = [], 0
        while self._outgoing and size < CHUNK_BYTES:
            part = self._outgoing.popleft()
            if size + len(part) > CHUNK_BYTES:
                self._outgoing.appendleft(part[CHUNK_BYTES - size :])
                part = part[: CHUNK_BYTES - size]
            parts.append(part)
            size += len(part)
        return b"".join(parts)
