"""User code in a process of its own, with limits, so that the worst it can do is to cost its own evaluation.

Limits of time, memory and processes, no network, no sight of other processes, none of the environment's variables but
harmless ones, no capabilities, and a temporary folder as the only place to write to. On Linux with user namespaces
(most distributions) all of them hold; where the kernel refuses those, and on macOS, a warning says what is missing, or
nothing is run: :attr:`SandboxLimits.isolation`. Files that the user can read stay readable.

That is for code of one's own. Code that a policy wrote is held to more: :class:`PolicyProgram`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import queue
import select
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gradwire.errors import UnsupportedError
from gradwire.rl.rewards.portable import capture

logger = logging.getLogger("gradwire.rl")

START = "import sys; sys.path.insert(0, sys.argv[1]); from _sandbox.serve import serve; serve()"
CHUNK = 64
SETUP_S = 60.0
GRACE_S = 10.0
ENVIRONMENT = ("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class SandboxLimits:
    """What one evaluation may take.

    Attributes:
        time_s: seconds by the clock.
        memory_bytes: address space of each process.
        file_bytes: size of any file that it writes.
        open_files: at once.
        max_processes: at once, itself included.
        output_bytes: of what it prints, kept; the rest is dropped.
        result_bytes: of what it returns, as JSON.
        network: whether it may use it (a judge behind an endpoint).
        environment: names of environment variables that it sees besides ``PATH``, ``HOME``, the language and the like.
        isolation: ``"required"``: run nothing on a machine that cannot isolate it. ``"preferred"``: run it all the
            same, with a warning. None: required for code that the policy wrote, preferred for functions of your own.
    """

    time_s: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    open_files: int = 64
    max_processes: int = 8
    output_bytes: int = 10_000
    result_bytes: int = 1 << 20
    network: bool = False
    environment: tuple[str, ...] = ()
    isolation: Literal["required", "preferred"] | None = None

    def __post_init__(self) -> None:
        if self.isolation not in ("required", "preferred", None):
            raise ValueError(f'isolation must be "required", "preferred" or None; this is {self.isolation!r}')


@dataclass(frozen=True)
class Outcome:
    """What came of an evaluation: a value (as JSON has it), or an ``error`` that says what went wrong."""

    value: Any = None
    error: str = ""
    printed: str = ""
    printed_cut: bool = False
    seconds: float = 0.0


class Sandbox:
    """Evaluates one function, in ``workers`` processes at once; each call, and each part of a map, in a new fork.

    Args:
        function: a plain function; arguments may be anything that pickles, results anything that JSON holds,
            dataclasses included.
        limits: of one evaluation.
        workers: evaluations at once.
    """

    def __init__(self, function: Callable[..., Any], limits: SandboxLimits | None = None, *, workers: int = 4) -> None:
        if not hasattr(os, "fork"):
            raise UnsupportedError("the sandbox needs Linux or macOS; use @reward_function(sandboxed=False) here")
        self.limits = limits or SandboxLimits()
        self._setup = pickle.dumps(
            {
                "function": capture(function),
                "limits": asdict(self.limits),
                "sys_path": [os.path.abspath(p) for p in sys.path],
            }
        )
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="gradwire sandbox")
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._warned = False

    async def call(self, *args: Any, **kwargs: Any) -> Outcome:
        """One evaluation. Never raises for what the function does."""
        return (await self._evaluate([pickle.dumps((args, kwargs))]))[0]

    async def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """One evaluation for each of these arguments by name, in order; far cheaper than as many calls.

        Evaluations share a process until one hangs or crashes, which costs that one alone. Neighbours go to different
        processes: what hangs often comes in groups, and then hangs at the same time.
        """
        requests = [pickle.dumps(((), dict(arguments))) for arguments in calls]
        count = max(min(self._workers, len(calls)), -(-len(calls) // CHUNK))
        parts = await asyncio.gather(*(self._evaluate(requests[at::count]) for at in range(count)))
        outcomes: list[Outcome | None] = [None] * len(calls)
        for at, part in enumerate(parts):
            outcomes[at::count] = part
        return [outcome for outcome in outcomes if outcome is not None]

    async def _evaluate(self, requests: list[bytes]) -> list[Outcome]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._until_done, requests)

    def close(self) -> None:
        """Ends the processes. A sandbox that is not closed ends with this process."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for worker in self._all:
                worker.end()

    def _until_done(self, requests: list[bytes]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while len(outcomes) < len(requests):
            outcomes += self._call(requests[len(outcomes) :])
        return outcomes

    def _call(self, requests: list[bytes]) -> list[Outcome]:
        """The outcomes of at least the first of these."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._setup, self.limits.environment)
            with self._lock:
                self._all.append(worker)
            ready = worker.receive(SETUP_S)
            if "error" in ready:
                worker.end()
                return [Outcome(error=str(ready["error"]))] * len(requests)
        answer = worker.ask(pickle.dumps(requests), self.limits.time_s * len(requests) + GRACE_S)
        if worker.broken:
            worker.end()
        else:
            self._idle.put(worker)
        if "error" in answer:
            return [Outcome(error=str(answer["error"]))]
        if answer["missing"] and self.limits.isolation != "required" and not self._warned:
            self._warned = True
            logger.warning(
                "reward functions run without isolation here: this machine refuses %s. They can reach what this "
                'process can. SandboxLimits(isolation="required") runs none instead',
                ", ".join(answer["missing"]),
            )
        return [Outcome(**each) for each in answer["results"]]


class _Worker:
    """A process that runs :mod:`gradwire.rl.rewards._sandbox`."""

    def __init__(self, setup: bytes, variables: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, str(Path(__file__).parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env=_environment(variables), start_new_session=True,
        )  # fmt: skip
        self.broken = False
        self._finalize = weakref.finalize(self, _end, self._process)
        self._send(setup)

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        self._send(request)
        return self.receive(timeout_s)

    def end(self) -> None:
        self._finalize()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(struct.pack("<I", len(content)) + content)
        try:
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            self.broken = True

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer; a process that died or is late is broken."""
        content = self._read(4, timeout_s)
        content = content and self._read(struct.unpack("<I", content)[0], timeout_s)
        if content is None:
            self.broken = True
            code = self._process.poll()
            state = "did not answer" if code is None else f"ended with {code}"
            return {"error": f"the sandbox's process {state}"}
        answer: dict[str, Any] = json.loads(content)
        return answer

    def _read(self, size: int, timeout_s: float) -> bytes | None:
        assert self._process.stdout is not None
        fd, parts = self._process.stdout.fileno(), []
        while size:
            if not select.select([fd], [], [], timeout_s)[0]:
                return None
            part = os.read(fd, size)
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _environment(variables: Sequence[str]) -> dict[str, str]:
    """What the sandbox's processes see of this one's environment: no keys, no tokens, no addresses."""
    passed = {name: os.environ[name] for name in (*ENVIRONMENT, *variables) if name in os.environ}
    return passed | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        # At the end of its input it tidies up and goes.
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
