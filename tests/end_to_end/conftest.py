"""A real server process on loopback, a real model on disk, the public SDK in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import gradwire
import numpy as np
import pytest
from support.server import Server


@pytest.fixture
async def service(server: Server) -> AsyncIterator[gradwire.ServiceClient]:
    async with gradwire.connect(server.address, connect_timeout=120) as service:
        yield service


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def _started(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tiny_model_path, tmp_path_factory.mktemp("killable")).start()
    yield running
    if running.process.poll() is None:
        assert running.end() == 0


@pytest.fixture
def killable(_started: Server) -> Server:
    """A server that a test may end, kill and start again, on a folder that has other tests' runs as well."""
    if _started.process.poll() is not None:
        _started.start()
    return _started
