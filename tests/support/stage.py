"""A server on a port of its own that a test kills and starts again, and the training loop that talks to it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gradwire
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.segments import Segments

from support import program
from support.child import children
from support.server import Server, free_port

PATIENCE_S = 300.0


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll a condition; return its first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.01)
    return value


def kill(pid: int) -> bool:
    """Kill a process; return whether it was running."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Stage:
    """One state folder, one server, one training loop.

    Args:
        flags: of `gradwire serve`. Checkpoints every few steps, so that recoveries meet them.
        state_dir: the server's state folder; by default a folder `state` in `folder`.
    """

    def __init__(self, model: Path, folder: Path, *flags: str, state_dir: Path | None = None) -> None:
        self.folder = folder
        self.state_dir = state_dir or folder / "state"
        self.crash_file = folder / "crash"
        self.out = folder / "results.jsonl"
        address = f"127.0.0.1:{free_port()}"
        folder.mkdir(exist_ok=True)
        flags = ("--address", address, "--checkpoint-every-steps", "7", "--threads", "1", *flags)
        self.server = Server(model, self.state_dir, *flags)
        self.client: subprocess.Popen[bytes] | None = None

    def start(self) -> Stage:
        os.environ["GRADWIRE_CRASH_FILE"] = str(self.crash_file)
        try:
            self.server.start()
        finally:
            del os.environ["GRADWIRE_CRASH_FILE"]
        return self

    def create(self, **settings: Any) -> str:
        with gradwire.sync.connect(self.server.address, connect_timeout=PATIENCE_S) as service:
            return str(service.create_run("tiny", **settings).run_id)

    def run_client(self, run_id: str, seed: int, count: int) -> None:
        """Start or restart the training loop."""
        self._loop = (self.server.address, run_id, str(seed), str(count), str(self.out))
        self.client = subprocess.Popen([sys.executable, program.__file__, *self._loop])

    def restart_client(self) -> None:
        assert self.client is not None
        self.client.wait(PATIENCE_S)
        self.client = subprocess.Popen([sys.executable, program.__file__, *self._loop])

    def restart_server(self) -> None:
        self.server.process.wait(PATIENCE_S)
        assert self.server.process.stdout is not None
        self.server.process.stdout.close()
        self.start()

    @property
    def engine_pid(self) -> int | None:
        return next(iter(children(self.server.process.pid)), None)

    @property
    def server_died(self) -> bool:
        return self.server.process.poll() is not None

    def finished(self) -> bool:
        """Whether the training loop has ended."""
        assert self.client is not None
        code = self.client.poll()
        assert code in (None, 0), f"the client ended with {code}"
        return code == 0

    def results(self) -> dict[int, Any]:
        return program.read_lines(self.out)

    def query(self, sql: str, *values: Any) -> list[Any]:
        """Query a copy of the server's database, with every commit that is durable."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "gradwire.db"
            with (
                closing(sqlite3.connect(f"file:{self.state_dir}/gradwire.db?mode=ro", uri=True, timeout=10)) as live,
                closing(sqlite3.connect(copy)) as copied,
            ):
                live.backup(copied)
            bring_up_to_date(copy, Segments(self.state_dir / "journal"))
            with closing(sqlite3.connect(copy)) as copied:
                return copied.execute(sql, values).fetchall()

    def applied(self, run_id: str) -> int:
        return int(self.query("SELECT applied_seq FROM runs WHERE run_id = ?", run_id)[0][0])

    def got_to(self, run_id: str, number: int) -> bool:
        """Whether this operation has a result, or the loop has ended."""
        return self.finished() or self.applied(run_id) >= number

    def state_of(self, run_id: str) -> dict[str, Any]:
        """Checksums of the run's whole state (weights, moments, accumulated gradients, moving average, generators),
        and its number of steps."""
        with gradwire.sync.connect(self.server.address, connect_timeout=PATIENCE_S) as service:
            run = service.get_training_client(run_id)
            run.save_checkpoint("final").result(PATIENCE_S)
        manifest = self.state_dir / "runs" / run_id / "checkpoints" / "final" / "manifest.json"
        content = json.loads(manifest.read_text())["content"]
        return {"step": content["step"], "seq": content["seq"]} | {
            name: stored["blake2b"] for name, stored in content["files"].items()
        }

    def close(self) -> None:
        for process in (self.client, self.server.process):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(PATIENCE_S)
        if self.server.process.stdout is not None:
            self.server.process.stdout.close()
