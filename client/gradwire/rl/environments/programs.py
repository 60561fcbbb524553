"""Run a program for one episode: in a folder of its own, with limits, and without anything that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.errors import UnsupportedError
from gradwire.rl.rewards._sandbox.launching import in_folder
from gradwire.rl.threads import run_in_daemon

MARK = "GRADWIRE_PROGRAM"
"""Environment variable by which processes that left their group are found."""
POLL_S = 0.1
GRACE_S = 2.0
"""Seconds between the request to end and the end."""
PASSED = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
"""Environment variables that programs get without being asked: no keys, no tokens."""


@dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        command: The command line.
        folder: The folder in which it runs.
        env: All of its environment variables.
        stdin: Its standard input.
        timeout_s: Seconds after which it is ended.
        output_bytes: The last bytes of standard output, and of standard error, that are kept.
    """

    command: tuple[str, ...]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    timeout_s: float = 600.0
    output_bytes: int = 1 << 16


@dataclass(frozen=True)
class Exit:
    """How a program ended.

    Attributes:
        status: Its exit status, negative for a signal; None if it was ended after ``timeout_s``.
        output, errors: The last bytes of its standard output and standard error.
        seconds: How long it ran.
    """

    status: int | None
    output: str
    errors: str
    seconds: float = 0.0


async def run_in_sandbox(program: Program) -> Exit:
    """Run a program that can write to its episode's folder alone, and sees its own processes alone.

    It can read what you can, and reach the network. The exit status is 126 where the machine cannot isolate it.
    """
    words = in_folder(program.command, str(program.folder.parent), str(program.folder))
    return await run_program(replace(program, command=tuple(words)))


async def run_program(program: Program) -> Exit:
    """Run a program to its end or its limit, and end every process that it started.

    A cancellation ends them, too.

    Raises:
        OSError: It cannot be started.
        UnsupportedError: The system has no groups of processes (Windows).
    """
    if not hasattr(os, "killpg"):
        raise UnsupportedError("programs of agents need Linux or macOS")
    stopped, ended = threading.Event(), threading.Event()
    try:
        return await run_in_daemon(lambda: _run(program, stopped, ended))
    finally:
        stopped.set()
        if not ended.is_set():  # cancelled: the folder is removed only after the processes have ended
            await run_in_daemon(lambda: ended.wait(2 * GRACE_S))


@contextlib.asynccontextmanager
async def own_folder(template: Path | None) -> AsyncIterator[Path]:
    """Make a folder of an episode's own with ``work``, a copy of a template folder or empty, and the empty folders
    ``home`` and ``tmp``; it is removed at the end."""
    root = Path(await run_in_daemon(lambda: _prepare(template)))
    try:
        yield root
    finally:
        await run_in_daemon(lambda: _remove(root))


def _prepare(template: Path | None) -> str:
    root = tempfile.mkdtemp(prefix="gradwire-agent-")
    try:
        (Path(root) / "home").mkdir()
        (Path(root) / "tmp").mkdir()
        if template is None:
            (Path(root) / "work").mkdir()
        else:
            shutil.copytree(template, Path(root) / "work", symlinks=True)
    except BaseException:
        _remove(Path(root))
        raise
    return root


def _remove(root: Path) -> None:
    """Remove a folder, also with parts that its program made unreadable."""
    with contextlib.suppress(OSError):
        for folder, folders, _ in os.walk(root):
            for name in folders:
                with contextlib.suppress(OSError):
                    os.chmod(os.path.join(folder, name), 0o700, follow_symlinks=os.name == "nt")
    shutil.rmtree(root, ignore_errors=True)


def _run(program: Program, stopped: threading.Event, ended: threading.Event) -> Exit:
    mark = os.urandom(16).hex()
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            program.command, cwd=program.folder, env={**program.env, MARK: mark}, bufsize=0,
            stdin=subprocess.PIPE if program.stdin else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            kept = _Streams(process, program)
            while not (over := _has_ended(process)) and not stopped.is_set():
                left = began + program.timeout_s - time.monotonic()
                if left <= 0:
                    break
                kept.read(min(left, POLL_S))
        finally:
            _end(process, mark)
        kept.read_rest()
        status = process.returncode if over else None
        return Exit(status, kept.output, kept.errors, time.monotonic() - began)
    finally:
        ended.set()


class _Streams:
    """The ends of a process's output; its input is written as it is read."""

    def __init__(self, process: subprocess.Popen[bytes], program: Program) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._most = program.output_bytes
        self._out, self._err = bytearray(), bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ, self._out)
        self._selector.register(process.stderr, selectors.EVENT_READ, self._err)
        self._unwritten = memoryview(program.stdin.encode())
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._selector.register(process.stdin, selectors.EVENT_WRITE, None)

    def read(self, timeout_s: float) -> bool:
        """Wait for output and keep its end; return whether there was any."""
        if not self._selector.get_map():  # it closed its output and runs on
            time.sleep(min(timeout_s, POLL_S / 5))
            return False
        found = False
        for key, _ in self._selector.select(timeout_s):
            stream: Any = key.fileobj
            if key.data is None:
                self._write(stream)
                continue
            part = os.read(stream.fileno(), 1 << 16)
            if not part:
                self._selector.unregister(stream)
                stream.close()
                continue
            found = True
            kept: bytearray = key.data
            kept.extend(part)
            del kept[: -self._most]
        return found

    def read_rest(self) -> None:
        """Read what is left in the pipes of a process that has ended."""
        while self._selector.get_map() and self.read(0):
            pass
        for key in tuple(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _write(self, stream: Any) -> None:
        try:
            self._unwritten = self._unwritten[os.write(stream.fileno(), self._unwritten[: 1 << 16]) :]
        except BrokenPipeError:
            self._unwritten = memoryview(b"")
        if not self._unwritten:
            self._selector.unregister(stream)
            stream.close()

    @property
    def output(self) -> str:
        return self._out.decode(errors="replace")

    @property
    def errors(self) -> str:
        return self._err.decode(errors="replace")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell without reaping it: its number is its group's until all of the group have ended."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the process, its group, and on Linux those that left the group."""
    if not _has_ended(process):
        _signal(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while not _has_ended(process) and time.monotonic() < until:
            time.sleep(POLL_S / 5)
    _signal(process.pid, signal.SIGKILL)
    process.wait()
    for number in _marked(mark):
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _marked(mark: str) -> Iterator[int]:
    """Find processes with this mark in their environment."""
    if sys.platform != "linux":
        return
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    yield int(name)
