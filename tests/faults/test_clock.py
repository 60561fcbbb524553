"""The wall clocks of server, engine and agent jump: leases, deadlines, heartbeats and results do not notice."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gradwire
import pytest
from support.agent import Agent
from support.server import Server

COMPILER = shutil.which("cc")
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);
static volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
    real = dlsym(RTLD_NEXT, "clock_gettime");
    int file = open(getenv("WALL_CLOCK"), O_RDONLY);
    void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead = found;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    if (!real) begin();
    int code = real(clock, at);
    if (!code && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead;
    return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class JumpingClock:
    """The wall clock of processes that are started with :attr:`environment`; the monotonic clock and all waiting go on.

    A few lines of C come before libc's own functions. libfaketime is not enough here: with it, sleeping on the
    monotonic clock fails, so that it ends threads that a jump leaves alone.

    Args:
        folder: For the compiled functions and the position of the clock.
    """

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        self._position, library = folder / "ahead", folder / "clock.so"
        (folder / "clock.c").write_text(SOURCE)
        compiled = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "clock.c"), "-ldl"]
        subprocess.run(compiled, check=True)
        self.jump(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._position)}

    def jump(self, days: float) -> None:
        """Set how far the clock is ahead of the real one."""
        with self._position.open("r+b" if self._position.exists() else "wb") as file:
            file.write(struct.pack("q", int(days * 86400)))


pytestmark = [
    pytest.mark.slow,  # an engine, or two
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C compiler: apt-get install gcc"),
]
JUMPS = (30, -400, 3000, 0)
"""Days ahead of the real clock, one after the other."""


def rows(number: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(number * 7 + 5 * place) % 90 + 3 for place in range(12)]} for _ in range(2)]


async def figures(run: gradwire.TrainingClient, clock: JumpingClock | None) -> list[float]:
    """Losses of training steps, between and during which the clock jumps."""
    found = []
    for number, days in enumerate(JUMPS):
        waiting = [
            run.train_step(rows(3 * number + each), "causal_lm", learning_rate=1e-2, timeout=120) for each in range(3)
        ]
        if clock is not None:
            await asyncio.sleep(0.05)
            clock.jump(days)
        found += [(await each).loss for each in waiting]
    return found


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    clock = JumpingClock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock


async def test_a_training_and_a_stream_go_on_while_the_wall_clock_jumps(
    tiny_model_path: Path, tmp_path: Path, clock: JumpingClock
) -> None:
    server = Server(tiny_model_path, tmp_path / "state", "--threads", "1").start()
    engine = server.engine_pid
    async with gradwire.connect(server.address) as service:
        expected = await figures(await service.create_run("tiny", lora=2, seed=1), None)
        run = await service.create_run("tiny", lora=2, seed=1)
        sampled = 0

        async def stream() -> None:
            nonlocal sampled
            client = service.sampling_client("tiny")
            while True:
                async for part in client.stream([5, 6], max_tokens=200, ignore_eos=True):
                    sampled += bool(part)

        streaming = asyncio.create_task(stream())
        assert await figures(run, clock) == expected
        clock.jump(-5000)
        before = sampled
        assert (await run.train_step(rows(50), "causal_lm", learning_rate=1e-2, timeout=120)).loss > 0
        while sampled < before + 20:
            await asyncio.sleep(0.01)
            assert not streaming.done()
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)
        late = run.train_step(rows(51), "causal_lm", learning_rate=1e-2, timeout=1e-4)
        with pytest.raises(gradwire.DeadlineExceededError):
            await late
        assert server.engine_pid == engine
        clock.jump(4000)
    assert await asyncio.to_thread(server.end) == 0
    clock.jump(-4000)  # the next start finds rows of the future
    await asyncio.to_thread(server.start)
    async with gradwire.connect(server.address) as service:
        again = await service.get_training_client(run.run_id)
        assert (await again.train_step(rows(52), "causal_lm", learning_rate=1e-2)).loss > 0
    assert await asyncio.to_thread(server.end) == 0


async def test_an_agents_lease_outlives_jumps_of_either_clock(
    tiny_model_path: Path, tmp_path: Path, clock: JumpingClock
) -> None:
    flags = ("--threads", "1", "--engine-lease", "20", "--engines", "0")
    server = Server(tiny_model_path, tmp_path / "state", *flags).start()
    for name in clock.environment:  # the agent's clock stays
        os.environ.pop(name)
    agent = Agent(server.address).start()
    try:
        async with gradwire.connect(server.address) as service:
            while not any(each.ready for each in (await service.server_info()).engines):
                assert agent.process.poll() is None, agent.said
                await asyncio.sleep(0.1)
            engine = agent.engine_pid
            expected = await figures(await service.create_run("tiny", lora=2, seed=1), None)
            assert await figures(await service.create_run("tiny", lora=2, seed=1), clock) == expected
            assert agent.engine_pid == engine
    finally:
        await asyncio.to_thread(agent.end, signal.SIGTERM)
        assert await asyncio.to_thread(server.end) == 0
