"""The process that runs the function."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import tempfile
import traceback
from typing import Any

from .frames import write_frame
from .isolation import die_with_parent, drop_capabilities, enclose, forbid_new_privileges, restrict
from .sealing import NAMESPACES, finish, hide

NOT_SEALED = "namespaces, and Landlock to root"


def plain(value: Any) -> Any:
    """Convert to JSON data: dataclasses to dicts, numpy scalars and arrays to Python's types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent back")


@dataclasses.dataclass(frozen=True)
class Pipes:
    """The worker's pipe ends: answers, output, and the guard's signal to continue."""

    reply: int
    printed: int
    next: int


def work(function: Any, requests: list[bytes], pipes: Pipes, limits: dict[str, Any]) -> None:
    """Run the function for each request and write the result; the next starts at the guard's signal."""
    for request in requests:
        write_frame(pipes.reply, answer_of(function, request, limits))
        os.read(pipes.next, 1)


def answer_of(function: Any, request: bytes, limits: dict[str, Any]) -> bytes:
    try:
        args, kwargs = pickle.loads(request)
        content = json.dumps({"value": function(*args, **kwargs)}, default=plain).encode()
        sys.stdout.flush()
        if len(content) > limits["result_bytes"]:
            raise ValueError(f"the result has {len(content)} bytes; at most {limits['result_bytes']} are allowed")
        return content
    except MemoryError:
        return json.dumps({"error": f"needed more than {limits['memory_bytes']} bytes of memory"}).encode()
    except BaseException as error:  # includes SystemExit: it fails one evaluation only
        own = function.__code__.co_filename
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
        line = f" (line {where[-1].lineno})" if where else ""
        return json.dumps({"error": f"{type(error).__name__}: {error}{line}"[:2000]}).encode()


def fork_worker(
    function: Any, requests: list[bytes], pipes: Pipes, limits: dict[str, Any], missing: list[str], folder: str
) -> int:
    """Start the worker, in a namespace under its own init if possible; return the process to wait for.

    Its first frame lists the missing parts of its isolation. If isolation is required and incomplete, it ends there.
    """
    child = os.fork()
    if child:
        return child
    die_with_parent()
    try:
        namespaced = not missing
        if namespaced:
            missing = enclose(folder)
        os.chdir(folder)
        write_frame(pipes.reply, json.dumps(missing).encode())
        if missing and limits["isolation"] == "required":
            return 0
        _become_worker(pipes, folder, namespaced)
        restrict(limits, len(requests), namespaced)
        drop_capabilities()
        if namespaced:
            # A bubblewrap that is installed setuid may still isolate the policy's code.
            forbid_new_privileges()
        work(function, requests, pipes, limits)
    finally:
        os._exit(0)


def fork_sealed(
    function: Any, requests: list[bytes], pipes: Pipes, limits: dict[str, Any], wall: str, folder: str
) -> int:
    """Fork a worker like :func:`fork_worker`, sealed off by a wall that was begun; without a wall it runs nothing."""
    child = os.fork()
    if child:
        return child
    die_with_parent()
    try:
        namespaced, places = wall == NAMESPACES, limits["places"]
        sealed = bool(wall) and (not namespaced or hide(places, folder, limits["file_bytes"]))
        if sealed:
            _become_worker(pipes, "/tmp", namespaced)
            restrict(limits, len(requests), namespaced=True)
            sealed = finish(wall, places, network=limits["network"])
        write_frame(pipes.reply, json.dumps([] if sealed else [NOT_SEALED]).encode())
        if sealed:
            work(function, requests, pipes, limits)
    finally:
        os._exit(0)


def _become_worker(pipes: Pipes, folder: str, namespaced: bool) -> None:
    """Go on as the worker, with no files but its pipes, below an init if there are namespaces."""
    if namespaced:
        grandchild = os.fork()
        if grandchild:
            os.close(pipes.reply)
            _, status = os.waitpid(grandchild, 0)
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    else:
        os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    quiet = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((quiet, 0), (pipes.printed, 1), (pipes.printed, 2)):
        os.dup2(source, target)
    kept = sorted((pipes.reply, pipes.next))
    for first, last in zip((3, *(each + 1 for each in kept)), (*kept, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(first, last)
