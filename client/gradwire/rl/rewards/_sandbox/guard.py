"""The process that supervises a worker: it waits, captures output, reports, kills."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import time
from typing import Any

from .isolation import isolate
from .sealing import begin
from .worker import Pipes, fork_sealed, fork_worker

REFUSED = {
    "required": (
        "not run: isolation is required, and this machine refuses {}; allow user namespaces, install bubblewrap, or "
        'set SandboxLimits(isolation="preferred") to run it anyway'
    ),
    "sealed": (
        "not run: others' code runs sealed off from the machine only, and this one refuses {}; its administrator can "
        "allow user namespaces, or let all users read Python and its packages"
    ),
}
"""Error texts for code that this machine cannot isolate, by the isolation that was asked for."""


def evaluate(function: Any, requests: list[bytes], limits: dict[str, Any], folder: str) -> dict[str, Any]:
    """In the guard: run evaluations one after the other, up to the first that ends the worker."""
    sealing = limits["isolation"] == "sealed"
    wall = begin(limits["network"], rules=True) if sealing else ""
    missing = [] if sealing else isolate(limits["network"])
    namespaced = bool(wall) if sealing else not missing
    reply_read, reply_write = os.pipe()
    printed_read, printed_write = os.pipe()
    next_read, next_write = os.pipe()
    pipes = Pipes(reply_write, printed_write, next_read)
    if sealing:
        child = fork_sealed(function, requests, pipes, limits, wall, folder)
    else:
        child = fork_worker(function, requests, pipes, limits, missing, folder)
    for fd in (reply_write, printed_write, next_read):
        os.close(fd)
    results: list[dict[str, Any]] = []
    reader = Reader(reply_read, printed_read, limits)
    timed_out, content = reader.next_answer()
    missing = missing if content is None else json.loads(content)
    started = time.monotonic()
    while not timed_out and len(results) < len(requests):
        started = time.monotonic()
        timed_out, answer = reader.next_answer()
        if answer is not None:
            results.append(read_answer(answer) | reader.take_printed() | {"seconds": time.monotonic() - started})
            with contextlib.suppress(BrokenPipeError):
                os.write(next_write, b".")
            continue
        break
    status = end(child, namespaced, kill=timed_out or len(results) == len(requests))
    if missing and limits["isolation"] in REFUSED:
        refused = REFUSED[limits["isolation"]].format(", ".join(missing))
        return {"results": [{"error": refused}] * len(requests), "missing": missing}
    if len(results) < len(requests):
        results.append(
            {"error": cause(status, timed_out, limits), "seconds": time.monotonic() - started} | reader.take_printed()
        )
    return {"results": results, "missing": missing}


class Reader:
    """Reads the worker's answers and output."""

    def __init__(self, reply: int, printed: int, limits: dict[str, Any]) -> None:
        self._reply, self._limits = reply, limits
        self._open = {reply, printed}
        self._answers, self._printed = b"", b""

    def next_answer(self) -> tuple[bool, bytes | None]:
        """Return whether the time ran out, and the next answer or None if there will be none."""
        deadline = time.monotonic() + self._limits["time_s"]
        while True:
            if len(self._answers) >= 4:
                size = 4 + struct.unpack("<I", self._answers[:4])[0]
                if len(self._answers) >= size:
                    answer, self._answers = self._answers[4:size], self._answers[size:]
                    self._drain()
                    return False, answer
                if size > self._limits["result_bytes"] + 4096:
                    return False, None
            if self._reply not in self._open:
                return False, None
            left = deadline - time.monotonic()
            if left <= 0:
                return True, None
            self._read(select.select(list(self._open), [], [], left)[0])

    def take_printed(self) -> dict[str, Any]:
        """Return the output printed since the last answer."""
        printed, self._printed = self._printed, b""
        limit = self._limits["output_bytes"]
        return {"printed": printed[:limit].decode(errors="replace"), "printed_cut": len(printed) > limit}

    def _drain(self) -> None:
        """Read the output printed before the answer: at most one pipe buffer."""
        for _ in range(4):
            self._read(select.select(list(self._open - {self._reply}), [], [], 0)[0])

    def _read(self, ready: list[int]) -> None:
        for fd in ready:
            part = os.read(fd, 1 << 16)
            if not part:
                self._open.discard(fd)
            elif fd == self._reply:
                self._answers += part
            else:
                self._printed = (self._printed + part)[: self._limits["output_bytes"] + 1]


def read_answer(answer: bytes) -> dict[str, Any]:
    try:
        result = json.loads(answer)
        return {key: result[key] for key in ("value", "error") if key in result}
    except (ValueError, TypeError):
        return {"error": "its answer could not be read"}


def end(child: int, namespaced: bool, *, kill: bool) -> int:
    """Kill the worker and its children (its namespace or its group), wait for it, and return its status."""
    if kill:
        try:
            os.kill(child, signal.SIGKILL)
            if not namespaced:
                os.killpg(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    return os.waitpid(child, 0)[1]


def cause(status: int, timed_out: bool, limits: dict[str, Any]) -> str:
    """Return why there is no answer."""
    if timed_out:
        return f"took more than {limits['time_s']:g} s and was killed"
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code > 128:
        return f"crashed: killed by {signal.Signals(code - 128).name}"
    return f"ended without an answer (exit code {code})"
