"""The other side of a comparison, in an environment of its own: a program that answers lines with JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gradwire_server.engine_client.launcher import ENVIRONMENT

WAITING = {name: ENVIRONMENT[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
"""How OpenMP's threads wait on both sides: as the engine's do. Threads that spin for long slow the other side down."""


class OtherSide:
    """A child process that reads a line and answers with a line of JSON; other lines that it prints are passed over.

    Args:
        name: What it is, for the message of its end.
        command: The command line.
        folder: Its working folder, which must exist; its stderr goes to a file there.
        env: Variables beside those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._errors = (folder / "stderr").open("w+b")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=folder,
            env={**os.environ, **(env or {})},
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line; return the answer.

        Raises:
            RuntimeError: The process has ended; the message has the end of its stderr.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        for said in self._process.stdout:
            if said.startswith("{"):
                answer: dict[str, Any] = json.loads(said)
                return answer
        self._errors.seek(0)
        raise RuntimeError(f"{self._name} ended:\n{self._errors.read()[-4000:].decode(errors='replace')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()
