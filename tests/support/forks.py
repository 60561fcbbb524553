"""Servers as forks of a process that has imported all they import: that is nine tenths of a start's processor time.

A process of pytest starts such a *stem* (:mod:`support.stem`) with its first server, and asks it for each. A fork is a
child of the process that asks; it has the command line, environment, folder and descriptors that it would have, and
runs its module as ``python -m`` does. So do a server's children and an engine's, which a stem of its own forks.

A server starts for real with ``GRADWIRE_TEST_REAL_START=1``, as in the slow lanes, where its test says so, and where
its environment differs from the stem's in more than :data:`FREE`: libraries read theirs when they are loaded.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FREE = ("GRADWIRE_", "PYTEST_", "GRPC_", "TORCHINDUCTOR_CACHE_DIR", "PYGAME_", "TRL_")
"""How variables begin that no server reads as it is imported, gRPC for example with the first channel. What tests and
libraries set for the rest of the suite belongs here, or every later server starts for real."""
MACHINES = ("x86_64", "aarch64")
FORKED = ("gradwire_server.cli", "gradwire_server.engine.process")
READ_AT_IMPORT = ("GRADWIRE_CRASH_FILE",)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
"""Of stems, whatever a test sets meanwhile."""
COMMAND_BYTES = 1 << 14
"""Room for a fork's command line, which is written over the stem's own."""
BOOT = "import sys; sys.path[0] = sys.argv[1]; from support.stem import be_a_stem; be_a_stem(int(sys.argv[2]))"


class Stem:
    """The asking end of a stem. Thread-safe."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()

    def fork(self, words: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], **more: bool) -> int:
        """Have a process forked; its id.

        Args:
            words: Those after ``python -m``.
            fds: Its file descriptors, and which of this process they are.
            more: ``session``: it begins one.
        """
        told = {"words": words, "env": dict(env), "fds": list(fds), "cwd": os.getcwd(), **more}
        with self._lock:
            socket.send_fds(self._link, [json.dumps(told).encode()], list(fds.values()))
            answer = self._link.recv(32)
        if not answer:
            raise RuntimeError("the process that servers are forked from ended; its traceback is in this test's stderr")
        return int(answer)


_stem: Stem | None = None
_starting = threading.Lock()


def stem() -> Stem:
    """The one of this process."""
    global _stem
    with _starting:
        _stem = _stem or _started()
    return _stem


def _started() -> Stem:
    from gradwire_server.engine_client.launcher import ENVIRONMENT as OF_ENGINES

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        tests, fd = str(Path(__file__).parents[1]), theirs.fileno()
        words = [sys.executable, "-c", BOOT, tests, str(fd), " " * COMMAND_BYTES]
        process = subprocess.Popen(words, pass_fds=[fd], env=OF_ENGINES | ENVIRONMENT, stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return Stem(ours)


class ForkedProcess(subprocess.Popen[str]):
    """A process that the stem forks for this one. It heeds Popen's ``env``, descriptors and session."""

    def _execute_child(
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Sequence[int], cwd: Any,
        env: Mapping[str, str] | None, *more: Any,
    ) -> None:  # fmt: skip
        pipes = more[3:9]  # the child's end and ours for stdin, ours and the child's for stdout and for stderr; or -1
        fds = {fd: fd if end == -1 else end for fd, end in enumerate((pipes[0], pipes[3], pipes[5]))}
        fds |= {fd: fd for fd in pass_fds}
        self.pid = stem().fork(args[2:], os.environ if env is None else env, fds, session=more[14])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def changed(env: Mapping[str, str]) -> set[str]:
    """Variables that differ from the stem's, and that an import may read."""
    different = {name for name in {*env, *ENVIRONMENT} if env.get(name) != ENVIRONMENT.get(name)}
    return {name for name in different if not name.startswith(FREE) or name in READ_AT_IMPORT}


def kind(command: Sequence[str], env: Mapping[str, str]) -> type[subprocess.Popen[str]]:
    """What starts a command: a fork, if it does the same as a process of its own."""
    ours = [*command[:2]] == [sys.executable, "-m"] and command[2] in FORKED
    forks = platform.machine() in MACHINES and not os.environ.get("GRADWIRE_TEST_REAL_START")
    return ForkedProcess if forks and ours and not changed(env) else subprocess.Popen
