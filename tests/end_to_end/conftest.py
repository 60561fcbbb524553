"""A real server process on loopback, a real model on disk, the public SDK in between."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import gradwire
import numpy as np
import pytest

from tests.support.tiny import tiny_model

VOCAB = 64
"""Ids below this are in the tiny model's vocabulary."""


class Server:
    """`gradwire serve` as a child process; can be stopped, killed and started again on the same state folder."""

    def __init__(self, model: Path, state_dir: Path, *args: str) -> None:
        self._command = [sys.executable, "-m", "gradwire_server.cli", "serve", "--address", "127.0.0.1:0"]
        self._command += ["--model", f"tiny={model}", "--state-dir", str(state_dir), *args]
        self.address = ""

    def start(self) -> Server:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("gradwire: listening on "):
                self.address = line.split()[-1]
                return self
        raise RuntimeError(f"the server ended with {self.process.wait()} before it listened")

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_path, tmp_path_factory.mktemp("state")).start()
    yield running
    assert running.end() == 0


@pytest.fixture
async def service(server: Server) -> AsyncIterator[gradwire.ServiceClient]:
    async with gradwire.connect(server.address) as service:
        yield service


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"numpy seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settled(*futures: object) -> list[object]:
    """The results or errors of futures, in order."""
    return await asyncio.gather(*futures, return_exceptions=True)  # type: ignore[call-overload, no-any-return]
