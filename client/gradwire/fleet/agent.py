"""One agent: the process `gradwire engine`, and the end of whoever started it when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

REFUSED = "refused"
"""Beginning of the state of an agent that ended for good."""
FOR_GOOD = 2
"""Exit code of an agent that the server refuses for good, or whose options are wrong: starting it again is no use."""
KEPT_LINES = 20


class RunningAgent:
    """An agent's process; the process of this object ends with it, so that Ray starts both again.

    Args:
        arguments: Arguments of the program `gradwire`.
        key: The API key, of the role "engine"; none for a server without keys.
    """

    def __init__(self, arguments: Sequence[str], key: str) -> None:
        environment = os.environ | {"COLUMNS": "1000"} | ({"GRADWIRE_API_KEY": key} if key else {})
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gradwire_server.cli", *arguments],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)
        if self._process.wait() != FOR_GOOD:
            os._exit(1)

    def state(self) -> str:
        """ "running", or why it is not."""
        code = self._process.poll()
        words = (line.strip("│ ") for line in reversed(self._said) if any(map(str.isalnum, line)))
        return "running" if code is None else f"{REFUSED}: {next(words, f'exit code {code}')}"

    def pid(self) -> int:
        """The agent's process."""
        return self._process.pid
