"""Floods of HTTP/2 without a key: another's calls are answered, and the memory comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import http2_floods
from support.http2_floods import ACKNOWLEDGED, AGAIN, FLOODS, UNREAD
from support.served import Served
from support.served import served as served  # a server with keys, for this module
from support.server import free_port

SECONDS = 8.0
ALLOWED_S = 0.25
"""99th percentile of another's calls beside a flood, on a machine without other work."""
BUSY_TIMES = 10
"""On a busy one it is this many times that without a flood, if that is more."""
ALLOWED_MIB = 200
KEPT_MIB = 100
ONE_CONNECTION = [
    *FLOODS,
    *(f"{name}{ACKNOWLEDGED}" for name in ("hpack_bomb", "rapid_reset", "half_messages")),
    *(f"{name}{UNREAD}" for name in ("pings", "settings", "rapid_reset")),
]
NGINX = Path(__file__).parents[2] / "deploy" / "nginx.conf"


@pytest.fixture
def proxy(served: Served, tmp_path: Path) -> Iterator[str]:
    """The address of nginx before the server, with deploy's configuration but for paths, ports and TLS."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    text = NGINX.read_text().replace("listen 443 ssl http2;", f"listen 127.0.0.1:{port} http2;")
    text = text.replace("server 127.0.0.1:50051;", f"server {served.server.address};")
    lines = [line for line in text.splitlines() if not line.strip().startswith("ssl_certificate")]
    (tmp_path / "nginx.conf").write_text("\n".join(lines))
    command = [nginx, "-p", str(tmp_path), "-e", "error.log", "-c", "nginx.conf"]
    command += ["-g", f"daemon off; pid {tmp_path}/pid;"]
    with subprocess.Popen(command) as process:
        try:
            _answers(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def _answers(port: int) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            http2_floods.Connection(f"127.0.0.1:{port}", reads=False, acknowledges=True).close()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return


class Beside:
    """Another's calls, and the memory of the front, before, during and after a flood."""

    def __init__(self, served: Served, address: str, file: Path) -> None:
        self._served, self._address, self._file = served, address, file

    def flood(self, name: str, seconds: float = SECONDS) -> None:
        served, before = self._served, self._memory()
        with served.steady_calls("other", self._file, self._address) as since:
            since()
            time.sleep(1.0)
            calm = since()
            served.forget_most()
            words = ["nice", "-n", "19", sys.executable, http2_floods.__file__, self._address, name, str(seconds)]
            sent = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
            beside = since()
            beside += self._next(since)  # one that began beside the flood may still wait
            most = self._memory("VmHWM")
            self._next(since, 2.0)
        after = self._memory()
        p99, calm_p99 = np.percentile(beside, 99), np.percentile(calm, 99)
        print(
            f"{name}: {sent}; another's calls p99 {1e3 * p99:.0f} ms, worst {1e3 * max(beside):.0f} ms"
            f" (without {1e3 * calm_p99:.0f} ms); front {most - before:+.0f} MiB, {after - before:+.0f} MiB after 2 s"
        )
        assert p99 <= max(ALLOWED_S, BUSY_TIMES * calm_p99)
        assert most - before <= ALLOWED_MIB
        assert after - before <= KEPT_MIB

    def _next(self, since: Callable[[], list[float]], seconds: float = 0.0) -> list[float]:
        time.sleep(seconds)
        found: list[float] = []
        while not found:
            time.sleep(0.05)
            found = since()
        return found

    def _memory(self, which: str = "VmRSS") -> float:
        return self._served.server.memory(which) / 2**20


@pytest.mark.faults
@pytest.mark.parametrize("name", ONE_CONNECTION)
def test_a_flood_of_one_connection_stops_nobody(served: Served, tmp_path: Path, name: str) -> None:
    Beside(served, served.server.address, tmp_path / "times").flood(name)


@pytest.mark.faults
@pytest.mark.parametrize("name", [*ONE_CONNECTION, f"hpack_bomb{AGAIN}", f"rapid_reset{AGAIN}"])
def test_behind_the_proxy_of_deploy_no_flood_stops_anybody(
    served: Served, proxy: str, tmp_path: Path, name: str
) -> None:
    Beside(served, proxy, tmp_path / "times").flood(name)
