"""Run user code in a separate process with limits, so that a failure affects only its own evaluation.

Limits of time, memory and processes, no network, no view of other processes, only harmless environment
variables, no capabilities, and a temporary folder as the only writable place. On Linux with user namespaces
(most distributions) all of them hold; if the kernel refuses those, and on macOS, a warning lists what is missing, or
nothing is run: :attr:`SandboxLimits.isolation`. Files that the user can read stay readable.

This is meant for your own code. Code written by a policy runs under stricter limits: :class:`PolicyProgram`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import pickle
import queue
import re
import select
import struct
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from gradwire.errors import UnsupportedError
from gradwire.futures import running_loop
from gradwire.rl.rewards.portable import capture

logger = logging.getLogger("gradwire.rl")


PACKAGES = (
    "numpy", "scipy", "pandas", "sympy", "scikit-learn", "rapidfuzz", "nltk", "rouge-score", "sacrebleu", "math-verify",
    "jsonschema", "pydantic", "PyYAML", "deepdiff", "sqlparse",
)  # fmt: skip
"""Packages that others' code may import where they are installed, with those that they need."""
NOT_OF_PYTHON = ("site-packages", "dist-packages", "test", "idlelib", "lib2to3", "ensurepip", "__pycache__")
"""In the folder of Python's library."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@functools.cache
def places() -> dict[str, list[str]]:
    """The folders and files that are ``shown``, those that there are, and what of them is ``hidden``."""
    machine = sysconfig.get_config_var("MULTIARCH") or ""
    libraries = ["/lib64", "/usr/lib64", f"/lib/{machine}", f"/usr/lib/{machine}", "/etc/ld.so.cache"]
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    hidden = [os.path.join(library, each) for each in NOT_OF_PYTHON]
    known = [library, *libraries, "/usr/share/zoneinfo", *map(os.path.realpath, _packages())]
    kept: list[str] = []
    for place in sorted({each for each in known if os.path.exists(each)}, key=len):
        above = [each for each in (*kept, *hidden) if place.startswith(each + "/")]
        if not above or max(above, key=len) in hidden:
            kept.append(place)
    return {"shown": kept, "hidden": [each for each in hidden if os.path.isdir(each)]}


def _packages() -> list[str]:
    found: dict[str, Distribution] = {}
    wanted = list(PACKAGES)
    while wanted:
        name = wanted.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.name not in found:
            found[package.name] = package
            needs = (each for each in package.requires or () if "extra ==" not in each)
            wanted += [match[0] for each in needs if (match := _NAME.match(each))]
    tops = {package.locate_file(file.parts[0]) for package in found.values() for file in package.files or ()}
    return [str(each) for each in tops if ".." not in str(each) and not str(each).endswith("__pycache__")]


START = "import sys; sys.path.insert(0, sys.argv[1]); from _sandbox.serve import serve; serve()"
CHUNK = 64
SETUP_S = 60.0
GRACE_S = 10.0
ENVIRONMENT = ("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one evaluation.

    Attributes:
        time_s: Wall-clock seconds.
        memory_bytes: Address space of each process.
        file_bytes: Maximum size of a written file.
        open_files: Maximum number of open files.
        max_processes: Maximum number of processes, itself included.
        output_bytes: Captured output; the rest is dropped.
        result_bytes: Maximum size of the result as JSON.
        network: Whether it may use the network (a judge behind an endpoint).
        environment: Names of visible environment variables besides ``PATH``, ``HOME``, the language and the like.
        isolation: ``"required"``: run nothing on a machine that cannot isolate it. ``"preferred"``: run it
            anyway, with a warning. ``"sealed"``: for others' code; as required, and it sees Python, the packages of
            :data:`PACKAGES` and an empty ``/tmp`` of ``file_bytes`` alone, and starts no processes. None: required for
            code written by the policy, preferred for your own functions.
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
    isolation: Literal["required", "preferred", "sealed"] | None = None

    def __post_init__(self) -> None:
        if self.isolation not in ("required", "preferred", "sealed", None):
            raise ValueError(f'isolation must be "required", "preferred", "sealed" or None, got {self.isolation!r}')


@dataclass(frozen=True)
class Outcome:
    """The result of an evaluation: a value (as JSON data), or an ``error`` message."""

    value: Any = None
    error: str = ""
    printed: str = ""
    printed_cut: bool = False
    seconds: float = 0.0


class Sandbox:
    """Evaluates one function in up to ``workers`` processes at once; each call, and each part of a map, is a new fork.

    Args:
        function: A plain function; arguments must be picklable, results must be representable in JSON (dataclasses
            included).
        limits: Limits of one evaluation.
        workers: Evaluations at once.
    """

    def __init__(self, function: Callable[..., Any], limits: SandboxLimits | None = None, *, workers: int = 4) -> None:
        if not hasattr(os, "fork"):
            raise UnsupportedError("the sandbox needs Linux or macOS; use @reward_function(sandboxed=False) here")
        self.limits = limits or SandboxLimits()
        self._setup = pickle.dumps(
            {
                "function": capture(function),
                "limits": asdict(self.limits) | {"places": places() if self.limits.isolation == "sealed" else {}},
                "sys_path": [os.path.realpath(p) for p in sys.path],
            }
        )
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="gradwire sandbox")
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._warned = False

    async def call(self, *args: Any, **kwargs: Any) -> Outcome:
        """Run one evaluation. An exception of the function is returned as an error, never raised."""
        return (await self._evaluate([pickle.dumps((args, kwargs))]))[0]

    async def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Run one evaluation for each set of keyword arguments, in order; far cheaper than separate calls.

        Evaluations share a process until one hangs or crashes, which costs only that one. Neighbours go to different
        processes: hanging evaluations often come in groups, and then hang in parallel.
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
        """Stop the processes, on an event loop in the background. An unclosed sandbox ends with this process."""
        if running_loop() is None:
            self._end()
        else:
            threading.Thread(target=self._end, name="gradwire sandbox's end").start()

    def _end(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for worker in self._all:
                worker.ask_to_end()
            for worker in self._all:
                worker.end()

    def _until_done(self, requests: list[bytes]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while len(outcomes) < len(requests):
            outcomes += self._call(requests[len(outcomes) :])
        return outcomes

    def _call(self, requests: list[bytes]) -> list[Outcome]:
        """Return the outcomes of at least the first of these."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._setup, self.limits)
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
        if answer["missing"] and self.limits.isolation not in ("required", "sealed") and not self._warned:
            self._warned = True
            logger.warning(
                "reward functions run without isolation here: this machine refuses %s. They can access everything that "
                'this process can. With SandboxLimits(isolation="required") they are not run',
                ", ".join(answer["missing"]),
            )
        return [Outcome(**each) for each in answer["results"]]


class _Worker:
    """A process that runs :mod:`gradwire.rl.rewards._sandbox`."""

    def __init__(self, setup: bytes, limits: SandboxLimits) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, str(Path(__file__).parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env=_environment(limits), start_new_session=True,
        )  # fmt: skip
        self.broken = False
        self._finalize = weakref.finalize(self, _end_forgotten, self._process)
        self._send(setup)

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        self._send(request)
        return self.receive(timeout_s)

    def ask_to_end(self) -> None:
        """Close the process's input, at whose end it exits."""
        _close_input(self._process)

    def end(self) -> None:
        """Wait for the process to exit, and kill it if it does not."""
        if self._finalize.detach():
            _end(self._process)

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(struct.pack("<I", len(content)) + content)
        try:
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            self.broken = True

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; a dead or late process counts as broken."""
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


def _environment(limits: SandboxLimits) -> dict[str, str]:
    """Select the environment variables for the sandbox's processes: no keys, no tokens, no addresses."""
    usual = ("LD_LIBRARY_PATH",) if limits.isolation == "sealed" else ENVIRONMENT
    passed = {name: os.environ[name] for name in (*usual, *limits.environment) if name in os.environ}
    return passed | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _end_forgotten(process: subprocess.Popen[bytes]) -> None:
    """End the process of a worker that was collected as garbage, which happens on event loops too: they cannot wait."""
    if threading.main_thread().is_alive():
        threading.Thread(target=_end, args=(process,), name="gradwire sandbox's end", daemon=True).start()
    else:  # the program ends
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    _close_input(process)
    try:
        # At the end of its input it cleans up and exits.
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
