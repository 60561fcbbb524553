"""The loop of a process: answers one request after the other, within a bound on its memory; ends with its input."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from gradwire_server.bounded.frames import ANSWERED, FAULT, REFUSED, REPLY, REQUEST, ProcessSettings
from gradwire_server.errors import ServiceError

LARGE = 1 << 16
"""After a request or an answer of more bytes, freed memory is given back to the system."""
AUTOGROUP = Path("/proc/self/autogroup")
ATTEMPTS = 10

Answer = Callable[[str, str, bytes], bytes]
"""``(method, owner, request)`` -> the response."""


def run(methods: Sequence[str], settings: ProcessSettings, answerer: Callable[[], Answer]) -> None:
    """Be a process of the pool: answer requests until standard input ends, and exit.

    Args:
        methods: Names of the methods, in the order by which the front numbers them.
        answerer: Makes what answers, within the bound on memory.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (settings.memory_bytes, settings.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the allocator of `tokenizers` aborts when memory runs out
    if settings.niceness:
        _yield_processors(settings.niceness)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to the log
    with contextlib.suppress(BrokenPipeError):  # the front has ended
        _serve(methods, settings, answerer(), sys.stdin.buffer, replies)
    os._exit(0)  # without the time to take everything down


def _serve(
    methods: Sequence[str], settings: ProcessSettings, answer: Answer, requests: BinaryIO, replies: BinaryIO
) -> None:
    while len(prefix := requests.read(REQUEST.size)) == REQUEST.size:
        method, owner_bytes, raw_bytes = REQUEST.unpack(prefix)
        owner = requests.read(owner_bytes).decode()
        kind, body = _answered(answer, methods[method], owner, requests.read(raw_bytes), settings)
        replies.write(REPLY.pack(kind, len(body)))
        replies.write(body)
        replies.flush()
        large = raw_bytes + len(body) > LARGE
        del body
        if large:
            _trim()


def _answered(answer: Answer, method: str, owner: str, raw: bytes, settings: ProcessSettings) -> tuple[int, bytes]:
    try:
        return ANSWERED, answer(method, owner, raw)
    except ServiceError as error:
        return REFUSED, error.error.SerializeToString()
    except MemoryError:
        return REFUSED, settings.too_much_memory(len(raw)).error.SerializeToString()
    except Exception as error:  # the boundary: the front logs it, and the caller receives a request id
        return FAULT, f"{type(error).__name__}: {error}".encode(errors="replace")


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _yield_processors(niceness: int) -> None:
    """Lower the priority of this process and, where the kernel gives each session a share of its own, of its session.

    There (``kernel.sched_autogroup_enabled``), niceness alone counts only among the processes of one session.
    """
    os.nice(niceness)
    for _ in range(ATTEMPTS):
        try:
            AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # the kernel takes one such change in 0.1 s
            time.sleep(0.1)
        except OSError:  # no such groups
            return
        else:
            return
