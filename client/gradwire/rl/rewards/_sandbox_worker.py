"""The sandbox's other side: a script of the standard library alone, run as a process of its own.

It rebuilds one function, then evaluates it as often as it is asked. Each request is a fork, with four generations:

    this process      holds the function, never runs it
      guard           waits as long as an evaluation may take, keeps what it prints, reports, kills
        init          first process of a new PID namespace: whatever the function forks dies with it
          worker      runs the function, under limits, in a temporary folder, without network

A request holds several evaluations, one after the other in the same worker. The first that hangs or crashes ends it:
the report has those before it and its error, and who asked sends the rest again, to a new worker.

Where the kernel refuses namespaces, init is left out, and the worker's process group is killed instead.

Frames on stdin and stdout: 4 bytes of length, little-endian, then pickle (in) or JSON (out). What comes out may have
been shaped by the function, so it is never unpickled.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dataclasses
import importlib
import json
import marshal
import math
import os
import pickle
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import types
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
NOBODY = 65534


# ------------------------------------------------------------------ the function


def rebuild(captured: dict[str, Any]) -> Any:
    """The function from what ``gradwire.rl.rewards.portable.capture`` made of it."""
    records = captured["functions"]
    scope: dict[str, Any] = {"__builtins__": builtins, "__name__": "reward_function"}
    functions: list[Any] = []
    for record in records:
        cells = tuple(types.CellType() for _ in record["closure"])
        functions.append(types.FunctionType(marshal.loads(record["code"]), scope, record["name"], None, cells or None))

    def value(encoded: tuple[str, Any]) -> Any:
        kind, content = encoded
        if kind == "module":
            for name in content[1:]:
                importlib.import_module(name)
            return importlib.import_module(content[0])
        return functions[content] if kind == "function" else pickle.loads(content)

    for record, function in zip(records, functions):
        scope.update({name: value(each) for name, each in record["globals"].items()})
        for cell, each in zip(function.__closure__ or (), record["closure"]):
            if each is not None:
                cell.cell_contents = value(each)
        function.__defaults__ = tuple(map(value, record["defaults"])) or None
        function.__kwdefaults__ = {name: value(each) for name, each in record["kwdefaults"].items()} or None
    return functions[0]


# ------------------------------------------------------------------ frames


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> bytes:
    return read_exactly(fd, struct.unpack("<I", read_exactly(fd, 4))[0])


def write_frame(fd: int, content: bytes) -> None:
    view = memoryview(struct.pack("<I", len(content)) + content)
    while view:
        view = view[os.write(fd, view) :]


# ------------------------------------------------------------------ isolation

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def isolate(network: bool, folder: str) -> bool:
    """Own user, PID, mount and (without network) network namespaces for what is forked next; False where refused."""
    if sys.platform != "linux":
        return False
    if os.geteuid() == 0:
        # The limit on processes is of the real user, and the kernel excuses root from it.
        os.setresuid(NOBODY, 0, 0)
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        die_with_parent()
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | (0 if network else CLONE_NEWNET)
    if _libc.unshare(flags) != 0:
        return False
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError:
        # Unmapped ids can still read and compute, which is what a reward function does.
        pass
    write_only_to(folder)
    return True


def write_only_to(folder: str) -> None:
    """Makes every file system read-only but this folder, as far as the kernel (5.12 and later) lets it."""

    def read_only(path: bytes, flags: int, *, on: bool) -> int:
        attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY * on, MOUNT_ATTR_RDONLY * (not on), 0, 0)
        size = ctypes.c_size_t(len(attributes))
        return int(_libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, size))

    place = os.fsencode(folder)
    if (
        _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and _libc.mount(place, place, None, MS_BIND, None) == 0
        and read_only(b"/", AT_RECURSIVE, on=True) == 0
    ):
        read_only(place, 0, on=False)


def restrict(limits: dict[str, Any], evaluations: int, namespaced: bool) -> None:
    """Limits of the worker, and of each process that it forks."""

    def limit(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, math.ceil(limits["time_s"] * evaluations) + 1)
    limit(resource.RLIMIT_AS, limits["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    limit(resource.RLIMIT_NOFILE, limits["open_files"])
    if namespaced:
        limit(resource.RLIMIT_NPROC, limits["max_processes"] + 3)
    if sys.platform == "linux":
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# ------------------------------------------------------------------ worker and guard


def plain(value: Any) -> Any:
    """For JSON: dataclasses as dicts, numpy's scalars and arrays as Python's."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent back")


@dataclasses.dataclass(frozen=True)
class Pipes:
    """The worker's ends: answers, prints, and the guard's word to go on."""

    reply: int
    printed: int
    next: int


def work(function: Any, requests: list[bytes], pipes: Pipes, limits: dict[str, Any], namespaced: bool) -> None:
    """Runs the function for each request, and writes what came of it; the next begins when the guard says so."""
    restrict(limits, len(requests), namespaced)
    for request in requests:
        write_frame(pipes.reply, answer_of(function, request, limits))
        os.read(pipes.next, 1)


def answer_of(function: Any, request: bytes, limits: dict[str, Any]) -> bytes:
    try:
        args, kwargs = pickle.loads(request)
        content = json.dumps({"value": function(*args, **kwargs)}, default=plain).encode()
        sys.stdout.flush()
        if len(content) > limits["result_bytes"]:
            raise ValueError(f"the result has {len(content)} bytes; {limits['result_bytes']} are allowed")
        return content
    except MemoryError:
        return json.dumps({"error": f"needed more than {limits['memory_bytes']} bytes of memory"}).encode()
    except BaseException as error:  # SystemExit included: whatever it does costs one evaluation
        own = function.__code__.co_filename
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
        line = f" (line {where[-1].lineno})" if where else ""
        return json.dumps({"error": f"{type(error).__name__}: {error}{line}"[:2000]}).encode()


def fork_worker(function: Any, requests: list[bytes], pipes: Pipes, limits: dict[str, Any], namespaced: bool) -> int:
    """Starts the worker, in a namespace under an init of its own where there is one; the process to wait for."""
    child = os.fork()
    if child:
        return child
    die_with_parent()
    try:
        if namespaced:
            grandchild = os.fork()
            if grandchild:
                os.close(pipes.reply)
                _, status = os.waitpid(grandchild, 0)
                os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        else:
            os.setsid()
        quiet = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((quiet, 0), (pipes.printed, 1), (pipes.printed, 2)):
            os.dup2(source, target)
        for fd in range(3, 64):
            if fd not in (pipes.reply, pipes.next):
                with contextlib.suppress(OSError):
                    os.close(fd)
        work(function, requests, pipes, limits, namespaced)
    finally:
        os._exit(0)


def evaluate(function: Any, requests: list[bytes], limits: dict[str, Any], folder: str) -> dict[str, Any]:
    """In the guard: evaluations one after the other, up to the first that takes the worker with it."""
    namespaced = isolate(limits["network"], folder)
    os.chdir(folder)
    reply_read, reply_write = os.pipe()
    printed_read, printed_write = os.pipe()
    next_read, next_write = os.pipe()
    child = fork_worker(function, requests, Pipes(reply_write, printed_write, next_read), limits, namespaced)
    for fd in (reply_write, printed_write, next_read):
        os.close(fd)
    results: list[dict[str, Any]] = []
    reader = Reader(reply_read, printed_read, limits)
    timed_out = False
    while len(results) < len(requests):
        started = time.monotonic()
        timed_out, answer = reader.next_answer()
        if answer is not None:
            results.append(read_answer(answer) | reader.take_printed() | {"seconds": time.monotonic() - started})
            with contextlib.suppress(BrokenPipeError):
                os.write(next_write, b".")
            continue
        break
    status = end(child, namespaced, kill=timed_out or len(results) == len(requests))
    if len(results) < len(requests):
        results.append(
            {"error": cause(status, timed_out, limits), "seconds": time.monotonic() - started} | reader.take_printed()
        )
    return {"results": results, "namespaced": namespaced}


class Reader:
    """What the worker answers and prints."""

    def __init__(self, reply: int, printed: int, limits: dict[str, Any]) -> None:
        self._reply, self._limits = reply, limits
        self._open = {reply, printed}
        self._answers, self._printed = b"", b""

    def next_answer(self) -> tuple[bool, bytes | None]:
        """Whether the time ran out, and the next answer, None when there will be none."""
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
        """What was printed since the last answer."""
        printed, self._printed = self._printed, b""
        limit = self._limits["output_bytes"]
        return {"printed": printed[:limit].decode(errors="replace"), "printed_cut": len(printed) > limit}

    def _drain(self) -> None:
        """What was printed before the answer: no more than a pipe holds."""
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
    """Waits for the worker, after killing it and what it forked (its namespace, or its group); its status."""
    if kill:
        try:
            os.kill(child, signal.SIGKILL)
            if not namespaced:
                os.killpg(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    return os.waitpid(child, 0)[1]


def cause(status: int, timed_out: bool, limits: dict[str, Any]) -> str:
    """Why there is no answer."""
    if timed_out:
        return f"took more than {limits['time_s']:g} s and was killed"
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code > 128:
        return f"crashed: killed by {signal.Signals(code - 128).name}"
    return f"ended without an answer (exit code {code})"


def serve() -> None:
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = pickle.loads(read_frame(requests))
    sys.path[:] = setup["sys_path"]
    try:
        function = rebuild(setup["function"])
    except BaseException as error:  # told to whoever calls
        write_frame(replies, json.dumps({"error": f"could not be set up: {type(error).__name__}: {error}"}).encode())
        return
    write_frame(replies, b"{}")
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        folder = tempfile.mkdtemp(prefix="gradwire-reward-")
        guard = os.fork()
        if guard == 0:
            code = 1
            try:
                die_with_parent()
                os.setpgid(0, 0)
                os.close(requests)
                write_frame(
                    replies, json.dumps(evaluate(function, pickle.loads(request), setup["limits"], folder)).encode()
                )
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(guard, 0)
        shutil.rmtree(folder, ignore_errors=True)
        if status:
            write_frame(replies, json.dumps({"error": f"the sandbox itself failed (status {status})"}).encode())


if __name__ == "__main__":
    serve()
