"""A real server process, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


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
        code = self.process.wait(timeout=120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code
