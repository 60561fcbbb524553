"""A connection that sends the head and the body of an answer together.

uvicorn writes them one after the other: two system calls, and a client that wakes up for the head alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's connection over a :class:`GatheringTransport`."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        gathering: Any = GatheringTransport(transport)
        super().connection_made(gathering)


class GatheringTransport:
    """A transport that sends what was written in one turn of the event loop by one call.

    Args:
        transport: The transport that sends, and that does all else.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._parts = transport, list[bytes]()
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        """Send the data at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Send what was written, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
