"""A real server process on loopback, a real model on disk, the public SDK in between."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
