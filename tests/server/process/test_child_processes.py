"""Child processes beside the loop: on asyncio's and uvloop's, what they say, how they end, and what cancels a start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from subprocess import PIPE, Popen
from typing import Any

import pytest
import uvloop
from gradwire_http import child_processes
from gradwire_http.child_processes import start_process


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """A loop of either kind; no descriptors are left behind, though threads of tests before may close and open some."""
    with asyncio.Runner(loop_factory=request.param) as first:
        first.run(asyncio.sleep(0))  # opens what stays open
    before = len(os.listdir("/proc/self/fd"))
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner
    deadline = time.monotonic() + 10  # what is left behind stays; what a thread reads is open for a moment
    while (after := len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after <= before


class SlowStarts:
    """Popen that waits until it may start a process, as a busy machine does."""

    def __init__(self) -> None:
        self.allowed, self.begun = threading.Event(), threading.Event()
        self.started: list[Popen[bytes]] = []

    def __call__(self, *args: Any, **options: Any) -> Popen[bytes]:
        self.begun.set()
        assert self.allowed.wait(30), "the event loop does not go on"
        self.started.append(Popen(*args, **options))
        return self.started[-1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStarts:
    slow = SlowStarts()
    monkeypatch.setattr(child_processes, "Popen", slow)
    return slow


def test_the_loop_goes_on_during_a_start(runner: asyncio.Runner, slow: SlowStarts) -> None:
    async def main() -> bytes:
        starting = asyncio.create_task(start_process("echo", "hi", stdout=PIPE))
        assert await asyncio.to_thread(slow.begun.wait, 30) and not starting.done()
        slow.allowed.set()
        return (await (await starting).communicate())[0]

    assert runner.run(main()) == b"hi\n"


def test_a_cancelled_start_waits_for_the_process_and_ends_it(runner: asyncio.Runner, slow: SlowStarts) -> None:
    """It inherits descriptors until it runs its program."""

    async def main() -> None:
        starting = asyncio.create_task(start_process("cat", stdin=PIPE, stdout=PIPE, stderr=PIPE))
        await asyncio.to_thread(slow.begun.wait, 30)
        for _ in range(2):
            starting.cancel("why")
            await asyncio.sleep(0.05)
            assert not starting.done()
        slow.allowed.set()
        with pytest.raises(asyncio.CancelledError, match="why"):
            await starting
        assert slow.started[0].returncode == -signal.SIGKILL

    runner.run(main())


def test_input_output_and_the_end(runner: asyncio.Runner) -> None:
    async def main() -> None:
        process = await start_process("cat", stdin=PIPE, stdout=PIPE, limit=1 << 20)
        assert process.stdin is not None and process.stdout is not None and process.returncode is None
        said = b"x" * (4 << 20)
        process.stdin.write(said)
        draining = asyncio.create_task(process.stdin.drain())
        assert await process.stdout.readexactly(len(said)) == said
        await draining
        process.terminate()
        assert await process.wait() == process.returncode == -signal.SIGTERM

    runner.run(main())


def test_the_end_is_the_processs_own(runner: asyncio.Runner) -> None:
    """Not that of others that hold its pipes."""

    async def main() -> None:
        process = await start_process("sh", "-c", "sleep 60 & exit 3", stdout=PIPE, start_new_session=True)
        assert await asyncio.wait_for(process.wait(), 30) == 3
        os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()

    runner.run(main())


def test_a_program_that_is_missing(runner: asyncio.Runner) -> None:
    with pytest.raises(FileNotFoundError):
        runner.run(start_process("no-such-program", stdin=PIPE))


def test_a_process_may_outlive_the_loop() -> None:
    code = "import asyncio, time; from gradwire_http.child_processes import start_process as start; "
    code += "asyncio.run(start('sleep', '0.2')); time.sleep(0.5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
