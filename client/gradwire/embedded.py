"""An embedded server that starts and stops with the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import ConnectionLostError, ServerStartError

ANNOUNCEMENT = "gradwire: listening on "
END_PATIENCE_S = 30.0
SHOWN_STDERR_BYTES = 4000
REFUSED = 2
"""Exit code of a server that says in one sentence why it does not start."""


class EmbeddedServer:
    """`gradwire serve` as a child process on loopback.

    Args:
        models: Names or paths of models, at least one.
        state_dir: Folder for the server's state; None uses a temporary folder that is removed with the server.
        server_args: Further arguments of `gradwire serve`.

    Attributes:
        key: API key of this server, random unless given, so that no other user of the machine can call it.
    """

    def __init__(
        self, models: Sequence[str], state_dir: Path | None, server_args: Sequence[str], key: str = ""
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-", ignore_cleanup_errors=True)
        logs = Path(self._folder.name)
        self._stdout, self._stderr = logs / "stdout", logs / "stderr"
        command = [sys.executable, "-m", "gradwire_server.cli", "serve", "--address", "127.0.0.1:0"]
        command += ["--state-dir", str(state_dir or logs / "state"), "--die-with-parent", "--key-on-stdin"]
        for model in models:
            command += ["--model", model]
        # Not in a worker thread: the child is killed when the thread that started it ends. It gets its own process
        # group because Ctrl-C (or a notebook's interrupt) signals the whole group, and the program may handle it and go
        # on.
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, *server_args],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self.key = key or secrets.token_urlsafe(32)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # it may have ended already
            stdin.write(f"{self.key}\n".encode())
        self._finalizer = weakref.finalize(self, _end, self._process, self._folder)

    async def listening(self, timeout_s: float) -> str:
        """Wait for the server to announce its address.

        Raises:
            ServerStartError: The server ended first or took too long; the message has the end of its stderr.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            ended = self._process.poll()
            for line in self._stdout.read_text(errors="replace").splitlines(keepends=True):
                if line.startswith(ANNOUNCEMENT) and line.endswith("\n"):
                    return line.split()[-1]
            if ended == REFUSED and (reasons := self._sentences()):
                raise ServerStartError(f"the embedded server did not start: {'; '.join(reasons)}")
            if ended is not None:
                raise ServerStartError(
                    f"the embedded server ended with exit code {ended} during its start{self._complaint()}"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise ServerStartError(f"the embedded server did not start within {timeout_s:g} s{self._complaint()}")
            await asyncio.sleep(0.03)

    def check_alive(self) -> None:
        """Raise ConnectionLostError if the process has ended."""
        ended = self._process.poll()
        if ended is not None:
            raise ConnectionLostError(f"the embedded server ended with exit code {ended}{self._complaint()}")

    async def close(self) -> None:
        # When the interpreter ends no thread can be started any more, and the finalizer is about to run by itself.
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(self._finalizer)

    def _sentences(self) -> list[str]:
        """Lines of the server's stderr that are addressed to the person who starts it, without its log."""
        lines = self._stderr.read_text(errors="replace").splitlines()
        return [line.removeprefix("gradwire: ") for line in lines if line.startswith("gradwire: ")]

    def _complaint(self) -> str:
        text = self._stderr.read_bytes()[-SHOWN_STDERR_BYTES:].decode(errors="replace").strip()
        return f"; it wrote:\n{text}" if text else " and wrote nothing to stderr"


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.cleanup()
