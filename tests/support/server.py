"""A real server process, as a user starts it."""

from __future__ import annotations

import os
import random
import socket
import sys
from pathlib import Path
from typing import Self

from support.child import Child, children

FLAGS = os.environ.get("GRADWIRE_TEST_FLAGS", "").split()
"""Further flags of servers whose test says nothing of engines or ranks: ``--engines 2``."""
_SAYS_ITSELF = ("--ranks", "--engines", "--engine", "--sampler")


def free_port() -> int:
    """Reserve a port that no outgoing connection is given: a restarted server must find it free, and
    whoever tries to reach it meanwhile may even be connected to itself."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, max(first_given, 11_000))))
            except OSError:
                continue
            return int(probe.getsockname()[1])


class Server(Child):
    """`gradwire serve` as a child process; can be stopped, killed and started again on the same state folder."""

    def __init__(self, model: Path, state_dir: Path, *args: str, name: str = "tiny", real: bool = False) -> None:
        command = [sys.executable, "-m", "gradwire_server.cli", "serve", "--address", "127.0.0.1:0"]
        command += ["--model", f"{name}={model}", "--state-dir", str(state_dir), *args]
        if not {*_SAYS_ITSELF} & {*args}:
            command += FLAGS
        super().__init__(command, "gradwire: listening on ", real=real)
        self.address, self.state_dir = "", state_dir

    def start(self) -> Self:
        self.address = self.launch()
        return self

    __enter__ = start

    @property
    def engine_pid(self) -> int:
        return next(iter(self.engine_pids.values()))

    @property
    def engine_pids(self) -> dict[int, int]:
        """Number of an engine -> its process's id."""
        pids = children(self.process.pid)
        words = {child: Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in pids}
        return {int(line[line.index("--number") + 1]): child for child, line in words.items() if "--number" in line}
