"""Listening, and ending without a second signal: what the processes of pages share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its process, which stops more than connections."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 picks a free one.

    Raises:
        OSError: The address cannot be used.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def url_of(listener: socket.socket) -> str:
    """The address of a listener, for browsers."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
