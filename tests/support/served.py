"""A server with keys, HTTP and the tiny model, for a module."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from gradwire_server.access.key_file import KeyFile

from support import steady_caller
from support.keyed import Keyed
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model


class Served:
    """The server, and a key for each user."""

    def __init__(self, server: HttpServer, file: KeyFile) -> None:
        self.server, self.file = server, file
        self.secrets = {name: file.create(name) for name in ("hostile", "other")}

    def renew(self, name: str) -> str:
        """Make a key in place of the name's earlier one."""
        self.secrets[name] = self.file.create(name, replace=True)
        return self.secrets[name]

    def http(self, name: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, headers={"X-API-Key": self.secrets[name]}, timeout=300)

    @asynccontextmanager
    async def grpc(self, name: str) -> AsyncIterator[tuple[grpc.aio.Channel, Any]]:
        async with grpc.aio.insecure_channel(
            self.server.address, options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            yield channel, Keyed(TrainingServiceStub(channel), self.secrets[name])

    @contextmanager
    def steady_calls(self, name: str, file: Path, address: str = "") -> Iterator[Callable[[], list[float]]]:
        """Have a process call again and again; what is given returns the seconds of each call since the last time.

        Args:
            address: The server's, or that of a proxy before it.
        """
        words = [sys.executable, steady_caller.__file__, address or self.server.address, self.secrets[name], str(file)]
        with subprocess.Popen(words) as caller:
            try:
                while not (file.exists() and file.read_text().count("\n") > 1):
                    assert caller.poll() is None
                    time.sleep(0.01)
                with file.open() as times:
                    rest = ""

                    def since() -> list[float]:
                        nonlocal rest
                        *lines, rest = (rest + times.read()).split("\n")  # the last line may be half written
                        return [float(line.split()[1]) for line in lines]

                    yield since
                assert caller.poll() is None
            finally:
                caller.kill()

    def forget_most(self) -> None:
        """Let VmHWM begin anew."""
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")

    def front_cpu_s(self) -> float:
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(folder / "model", context_length=4096)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (folder / "state").mkdir()
    server = HttpServer(model, folder / "state", free_port(), "--threads", "1", real=True)
    file = KeyFile(folder / "state")
    found = Served(server, file)
    server.start()
    yield found
    assert server.end() == 0
