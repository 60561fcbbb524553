"""Connections that must send the head of a request in time and in size, before anybody knows who is there.

uvicorn waits for a head without end, and keeps all of it: connections without a key would hold descriptors for ever,
and memory without bound.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""Seconds that a request's head may take, from the connection or the head's first byte on."""
HEAD_BYTES = 64 << 10
"""Bytes that it may have; what arrives with its end is not counted."""
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 34\r\n\r\nthe headers have more than 64 KiB\n"
)


class BoundedHeads(HttpToolsProtocol):
    """A connection whose requests have small and prompt heads."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._late: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End it."""
        self._have_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        super().data_received(data)
        if self._late is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._have_head()
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._have_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._have_head()
        self._late = asyncio.get_running_loop().call_later(HEAD_S, self.transport.close)
        self._head_bytes = 0

    def _have_head(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()
