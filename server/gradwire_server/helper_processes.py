"""Processes that answer one question at a time for a thread that waits, and are ended when one takes too long.

A few kilobytes from a stranger may keep a library busy for minutes, or take gigabytes. A question is preceded by its
length; the answer is the length of a JSON object, the object, the length of some bytes, and the bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import resource
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

MEMORY_BYTES = 2 << 30
"""Memory that one process may take."""
_LENGTH = struct.Struct("<Q")
_BLOCK = 1 << 20

Told = dict[str, Any]
"""The JSON object of an answer."""


def serve(answer: Callable[[bytes], tuple[Told, bytes]]) -> None:
    """Be such a process: answer until the standard input ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reading, writing = sys.stdin.buffer, sys.stdout.buffer
    while (question := _read(reading)) is not None:
        told, content = answer(question)
        header = json.dumps(told).encode()
        writing.write(_LENGTH.pack(len(header)) + header + _LENGTH.pack(len(content)))
        writing.write(content)
        writing.flush()


def _read(stream: BinaryIO) -> bytes | None:
    start = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(start)[0]) if len(start) == _LENGTH.size else None


class _Helper:
    """One process."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, question: bytes, seconds: float) -> tuple[Told, bytearray]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_LENGTH.pack(len(question)))
            self._process.stdin.write(question)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError from error
        until = time.monotonic() + seconds
        header = self._read(_LENGTH.unpack(self._read(_LENGTH.size, until))[0], until)
        return json.loads(header), self._read(_LENGTH.unpack(self._read(_LENGTH.size, until))[0], until)

    def _read(self, size: int, until: float) -> bytearray:
        assert self._process.stdout is not None
        data = bytearray(size)
        view = memoryview(data)
        while view:
            left = until - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                raise TimeoutError
            count = self._process.stdout.raw.readinto(view[:_BLOCK])  # type: ignore[attr-defined]  # a BufferedReader
            if not count:
                raise EOFError
            view = view[count:]
        return data

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was not sent any more
                pipe.close()


class Helpers:
    """Processes of one kind, started when they are needed; they end with this process. Thread-safe.

    Args:
        module: The module that they run; it calls :func:`serve`.
        count: Processes at most.
    """

    def __init__(self, module: str, count: int) -> None:
        self._module = module
        self._turns = threading.BoundedSemaphore(count)
        self._idle: list[_Helper] = []
        atexit.register(self._end_idle)

    def ask(self, question: bytes, seconds: float) -> tuple[Told, bytearray]:
        """Ask a question.

        Args:
            seconds: That the answer may take.

        Raises:
            TimeoutError: It took longer; the process is ended.
            EOFError: The process ended.
        """
        with self._turns:
            helper = self._idle.pop() if self._idle else _Helper(self._module)
            try:
                answer = helper.ask(question, seconds)
            except BaseException:
                helper.end()
                raise
            self._idle.append(helper)
        return answer

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()
