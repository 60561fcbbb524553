"""The process that runs the function."""

from __future__ import annotations

import contextlib
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
    drop_capabilities()
    if namespaced:
        # Elsewhere a bubblewrap that is installed setuid may still isolate the policy's code.
        forbid_new_privileges()
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


def fork_worker(
    function: Any, requests: list[bytes], pipes: Pipes, limits: dict[str, Any], missing: list[str], folder: str
) -> int:
    """Starts the worker, in a namespace under an init of its own where there is one; the process to wait for.

    Its first frame is the list of what is missing of its isolation. Where there must not be any, it ends there.
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
        for fd in range(3, 64):
            if fd not in (pipes.reply, pipes.next):
                with contextlib.suppress(OSError):
                    os.close(fd)
        work(function, requests, pipes, limits, namespaced)
    finally:
        os._exit(0)
