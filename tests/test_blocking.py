"""The detector of what holds the event loop: what it catches, what it names, and what it lets pass."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable

import pytest
from support.blocking import BlockingDetector


def sleep_at_once() -> None:
    time.sleep(0.5)


def compute(seconds: float = 0.5) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


async def hold(what: Callable[[], None]) -> None:
    what()


@pytest.mark.parametrize("what", [sleep_at_once, compute])
async def test_what_holds_the_loop_is_caught_and_named(
    what: Callable[[], None], blocking_detector: BlockingDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    with blocking_detector.reports() as reports:
        await asyncio.create_task(hold(what))
    (report,) = reports
    assert "coro=<hold()" in report and f"in {what.__name__}\n" in report and __file__ in report


@pytest.mark.long
async def test_what_the_test_itself_does_is_let_pass(
    blocking_detector: BlockingDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    with blocking_detector.reports() as reports:
        await asyncio.sleep(0)
        compute()
        await asyncio.sleep(0)
        assert reports == []
        await hold(compute)
        await asyncio.sleep(0)
    assert len(reports) == 1


async def test_threads_and_waiting_are_let_pass(blocking_detector: BlockingDetector) -> None:
    with blocking_detector.reports() as reports:
        await asyncio.gather(asyncio.to_thread(sleep_at_once), asyncio.sleep(0.5))
    assert reports == []


async def test_another_threads_hold_on_the_interpreter_is_let_pass(blocking_detector: BlockingDetector) -> None:
    def waits_for_the_other() -> None:
        other = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(500_000,))  # PyDLL keeps the interpreter
        other.start()
        other.join()

    with blocking_detector.reports() as reports:
        began = time.monotonic()
        await asyncio.create_task(hold(waits_for_the_other))
        assert time.monotonic() - began >= 0.5
    assert reports == []


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the kernel does not say who waits")
async def test_a_busy_machine_is_nobodys_fault(blocking_detector: BlockingDetector) -> None:
    """With three more processes a core, 0.15 s of work takes far longer than the limit."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=compute, args=(30.0,)) for _ in range(3 * len(os.sched_getaffinity(0)))]
    for other in others:
        other.start()
    try:
        await asyncio.sleep(1.0)
        with blocking_detector.reports() as reports:
            for _ in range(3):
                await asyncio.create_task(hold(lambda: compute(0.15)))
        assert reports == []
    finally:
        for other in others:
            other.kill()
            await asyncio.to_thread(other.join)
