"""A real grpc.aio server over an engine without a model, and a whole server with the HTTP doors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from support.front import door, start
from support.server import free_port
from support.tinker import HttpServer, TinkerClient
from support.tiny import tiny_model

__all__ = ["door", "start"]


@pytest.fixture(scope="session")
def tinker_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("tinker")
    served = HttpServer(tiny_model(folder / "model"), folder / "state", free_port(), "--threads", "1")
    served.start()
    yield served
    served.end()


@pytest.fixture
async def tinker(tinker_server: HttpServer) -> AsyncIterator[TinkerClient]:
    """A session of its own."""
    async with httpx.AsyncClient(base_url=tinker_server.url, timeout=60) as http:
        yield await TinkerClient(http).begin()
