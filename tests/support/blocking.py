"""Find what holds an event loop: which callback, for how long, and where it was.

A callback is measured by its thread's processor time, and by the wall time that the thread did not spend waiting for a
processor, where the kernel tells it (in Linux's ``schedstat``). A busy machine adds something all the same: caches are
cold, and a virtual machine's processor is taken away. So its load scales the limit. Two things do not count: garbage
collections, which go through the objects of all tests, and wall time in which the sampling thread did not run either.
Then the whole process stood still, or another thread held the interpreter; a callback that holds the interpreter
itself uses the processor, which is measured. Nor does what a test does in a loop as a command or a thread does it,
when it calls the server's plain functions itself; the SDK's are called in the loops of users.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

LIMIT_S = 0.25
"""On an idle machine."""
_SAMPLE_S = 0.05


@dataclass(eq=False)
class _Callback:
    """A callback that runs now.

    Attributes:
        thread: Where it runs.
        began: Monotonic time in seconds.
        collecting_s: Processor time of the garbage collections meanwhile.
        excused_s: Wall time within :meth:`BlockingDetector.excused`.
        excused_cpu_s: Processor time within it.
        first: Where it was first seen, formatted, from the callback inwards.
        last: Where it was last seen, if it was seen again: at its end, perhaps, and not where the time went.
        by_test: Whether the test itself was at work wherever it was seen.
    """

    thread: int
    began: float
    collecting_s: float = 0.0
    excused_s: float = 0.0
    excused_cpu_s: float = 0.0
    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    by_test: bool = True


class BlockingDetector:
    """Watches every callback of every asyncio loop of this process from :meth:`install` on."""

    def __init__(self) -> None:
        self._reports: list[str] = []
        self._running: dict[int, _Callback] = {}
        self._local = threading.local()
        self._late_s = 0.0
        self._sampled = time.monotonic()

    def install(self) -> None:
        original = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            callback = _Callback(threading.get_ident(), time.monotonic())
            waited, used, stalled = self._waiting_s(), time.thread_time(), self._stalled_s()
            outer, self._running[callback.thread] = self._running.get(callback.thread), callback
            try:
                original(handle)
            finally:
                if outer is None:
                    del self._running[callback.thread]
                else:
                    self._running[callback.thread] = outer
                wall = time.monotonic() - callback.began
                if wall > LIMIT_S:
                    waited = max(self._waiting_s() - waited, self._stalled_s() - stalled)
                    self._judge(handle, callback, wall, waited, time.thread_time() - used)

        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.callbacks.append(self._collecting)
        threading.Thread(target=self._sample, name="blocking-detector", daemon=True).start()

    @contextmanager
    def reports(self) -> Iterator[list[str]]:
        """The reports of what blocks within the context."""
        outer, self._reports = self._reports, []
        try:
            yield self._reports
        finally:
            self._reports = outer

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Wait in a test for what users wait for outside a loop, as for a server's start."""
        began, used = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            callback = self._running.get(threading.get_ident())
            if callback is not None:
                callback.excused_s += time.monotonic() - began
                callback.excused_cpu_s += time.thread_time() - used

    def _judge(self, handle: asyncio.Handle, callback: _Callback, wall: float, waited: float, used: float) -> None:
        limit = LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        used -= callback.collecting_s + callback.excused_cpu_s
        held = wall - waited - callback.collecting_s - callback.excused_s
        if not callback.first:  # C code throughout: gRPC's poller waits for the lock of a thread that has no processor
            held = used
        if max(used, held) > limit and not (callback.first and callback.by_test):
            owner = getattr(handle._callback, "__self__", handle)  # type: ignore[attr-defined]
            where = "".join(callback.first) or "  one call that held the interpreter\n"
            if callback.last not in ([], callback.first):
                where += "and at last in\n" + "".join(callback.last)
            self._reports.append(f"{owner!r}\nheld the loop for {held:.2f} s ({used:.2f} s of processor), in\n{where}")

    def _collecting(self, phase: str, about: dict[str, int]) -> None:
        callback = self._running.get(threading.get_ident())
        if callback is not None:
            callback.collecting_s += time.thread_time() * (1 if phase == "stop" else -1)

    def _sample(self) -> None:
        while True:
            time.sleep(_SAMPLE_S)
            now = time.monotonic()
            self._late_s += max(0.0, now - self._sampled - _SAMPLE_S)
            self._sampled = now
            for callback in list(self._running.values()):
                if now - callback.began < LIMIT_S / 2:
                    continue
                frame = sys._current_frames().get(callback.thread)
                if frame is not None and self._running.get(callback.thread) is callback:
                    callback.last = _stack_inside(frame)
                    callback.first = callback.first or callback.last
                    callback.by_test &= _is_by_test(frame)

    def _stalled_s(self) -> float:
        """Seconds that the sampling thread has been late so far, together."""
        return self._late_s + max(0.0, time.monotonic() - self._sampled - _SAMPLE_S)

    def _waiting_s(self) -> float:
        """Seconds that this thread has waited for a processor so far; 0 where the kernel does not say."""
        descriptor = self._schedstat()
        return 0.0 if descriptor is None else int(os.pread(descriptor, 64, 0).split()[1]) / 1e9

    def _schedstat(self) -> int | None:
        if not hasattr(self._local, "descriptor"):
            try:
                self._local.descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            except OSError:
                self._local.descriptor = None
        found: int | None = self._local.descriptor
        return found


def _stack_inside(frame: FrameType) -> list[str]:
    """The stack from the callback inwards."""
    entries = traceback.extract_stack(frame)
    start = max((index for index, entry in enumerate(entries) if entry.filename == __file__), default=-1)
    return traceback.format_list(entries[start + 2 :])  # without this file and asyncio's Handle._run


def _is_by_test(frame: FrameType | None) -> bool:
    """Whether a test runs what the frame is in, without a coroutine of others and without the SDK."""
    while frame is not None and frame.f_code.co_filename != __file__:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            return frame.f_code.co_name.startswith("test_")
        if module.partition(".")[0] == "gradwire":
            return False
        frame = frame.f_back
    return False


DETECTOR = BlockingDetector()
"""The detector of this process."""
