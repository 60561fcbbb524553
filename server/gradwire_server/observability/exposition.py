"""Metrics endpoint over HTTP, served by its own threads, so that scrapes and training do not wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import ProcessCollector, start_http_server

from gradwire_server.observability.metrics import Backlog, Metrics, Present, Watched

LOOP_PATIENCE_S = 5.0


class Exposition:
    """HTTP server of ``GET /metrics``.

    Args:
        address: ``HOST:PORT``; port 0 picks a free port.
        backlog: Returns the present backlog; called on the running event loop.

    Raises:
        OSError: The address cannot be bound.

    Attributes:
        address: ``HOST:PORT`` where it listens.
    """

    def __init__(
        self,
        metrics: Metrics,
        address: str,
        backlog: Callable[[], Backlog],
        engines: Callable[[], Sequence[Watched]],
    ) -> None:
        loop = asyncio.get_running_loop()

        async def ask() -> Backlog:
            return backlog()

        def from_thread() -> Backlog:
            return asyncio.run_coroutine_threadsafe(ask(), loop).result(LOOP_PATIENCE_S)

        metrics.registry.register(Present(from_thread, engines))
        ProcessCollector(registry=metrics.registry)
        host, _, port = address.rpartition(":")
        self._server: WSGIServer
        self._thread: Thread
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), metrics.registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop the HTTP server and wait for its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
