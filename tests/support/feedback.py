"""A real feedback service, as a user starts it, and a PostgreSQL server of the tests' own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.child import Child
from support.server import free_port

ANNOUNCEMENT = "gradwire feedback: listening on "
QUICK = {"maxSteps": 2, "maxNewTokens": 4, "batchSize": 2, "miniBatchSize": 2, "ppoEpochs": 1, "learningRate": 1e-3}
"""Settings of a training that takes seconds."""


class FeedbackService(Child):
    """`gradwire feedback serve` as a child process; can be stopped, killed and started again on the same data."""

    def __init__(self, folder: Path, base_model: str, *args: str, database: str = "") -> None:
        self.folder = folder
        self.database = database or f"sqlite:///{folder / 'feedback.db'}"
        command = [sys.executable, "-m", "gradwire_feedback.cli", "serve", "--base-model", base_model]
        command += ["--address", f"127.0.0.1:{free_port()}", "--database", self.database]
        command += ["--models-dir", str(folder / "models"), *args]
        super().__init__(command, ANNOUNCEMENT)
        self.url = ""

    def start(self) -> FeedbackService:
        self.url = self.launch()
        return self

    __enter__ = start

    def refused(self) -> str:
        """Start it where it must not start; gives what it says."""
        ended = subprocess.run(self._command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        return ended.stderr

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/policies", timeout=300, **settings)


def run_keys(service: FeedbackService, *args: str) -> str:
    """`gradwire feedback keys …`; gives what it printed."""
    command = [sys.executable, "-m", "gradwire_feedback.cli", "keys", *args, "--database", service.database]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def scores(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Feedback on a few prompts, from bad to excellent."""
    return [
        {"prompt": f"Say {n % 5}", "response": f"{n}", "score": (n % 11) / 10, "runId": f"run-{n}"}
        for n in range(start, start + count)
    ]


def postgres_programs() -> Path | None:
    """Where initdb and postgres are; Debian keeps them out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A fresh server on loopback; gives the URL of its database."""
    programs = postgres_programs()
    assert programs is not None
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # which initdb refuses
        account = pwd.getpwnam("postgres")
        os.chown(folder, account.pw_uid, account.pw_gid)
        for parent in folder.parents:  # pytest's folders are its user's alone
            if parent.stat().st_uid == 0 and parent != Path("/tmp") and parent.is_relative_to("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o011)
        user = {"user": account.pw_uid, "group": account.pw_gid}
    data, port = folder / "data", free_port()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder} | user
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "gradwire", "-A", "trust", "--no-sync", "-E", "UTF8"],
        check=True, **quiet,
    )  # fmt: skip
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder],
        **(quiet | {"stderr": log}),
    )
    try:
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-t", "30"]
        while subprocess.run(ready, check=False, **quiet).returncode != 0:
            assert server.poll() is None, "postgres ended at its start"
        yield f"postgresql://gradwire@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)
        log.close()
