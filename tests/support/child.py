"""A program as a user starts it: a child process that says when it is ready."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support import forks
from support.blocking import DETECTOR


def children(pid: int) -> list[int]:
    """Processes that a process started, in any of its threads; sorted."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, thread.read_text().split())
    return sorted(found)


class Child:
    """A child process; can be stopped, killed and started again.

    In a ``with`` statement it is started, and ended however the test ends.

    Args:
        command: What is run.
        announcement: How the line begins that ends with the child's address.
        env: Its environment, beside this process's.
        real: Start it in any case as a user does, not as a fork (:mod:`support.forks`): its memory is measured.
    """

    def __init__(
        self, command: Sequence[str], announcement: str, env: dict[str, str] | None = None, *, real: bool = False
    ) -> None:
        self._command, self._announcement, self._real = list(command), announcement, real
        self._env = {"OMP_NUM_THREADS": "1"} | (env or {})

    def launch(self) -> str:
        """Start it; gives its address."""
        with DETECTOR.excused():
            env = os.environ | self._env
            start = forks.RealProcess if self._real else subprocess.Popen
            self.process = start(self._command, stdout=subprocess.PIPE, text=True, env=env)
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith(self._announcement):
                    return line.split()[-1]
            raise RuntimeError(f"{self._command[2]} ended with {self.process.wait()} before it listened")

    def memory(self, what: str) -> int:
        """A size of the process in bytes: VmRSS, or VmHWM for the largest so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{what}:")[1].split()[0]) << 10

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        with DETECTOR.excused():
            code = self.process.wait(timeout=120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.closed:  # else the test itself ended it
            code = self.end()
            assert failure is not None or code == 0, f"it ended with {code}"
