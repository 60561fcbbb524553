"""OpenMP's idle threads: they sleep at once while others want the processors, and spin otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch  # whose OpenMP is meant
from gradwire_server.engine.process import setup
from gradwire_server.engine.process.setup import IdleThreads, contended
from gradwire_server.engine_client.launcher import ENVIRONMENT

SPINS = "200000"
SPEND = """
import time, torch
from gradwire_server.engine.process.setup import IdleThreads
torch.set_num_threads(2)
x, idle = torch.ones(1 << 17), IdleThreads(2)

def spent():
    before = time.process_time()
    for _ in range(30):
        x.exp()
        time.sleep(0.02)
    return time.process_time() - before

x.exp()
idle.sleep()
print(spent())
idle.spin()
time.sleep(0.2)
print(spent())
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads outnumber one processor")
def test_idle_threads_sleep_and_spin() -> None:
    asleep, spinning = map(float, _output(SPEND).split())
    assert spinning > 3 * asleep


def test_they_sleep_while_others_want_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0, 0), (5, 5), (15, 5), (20, 10), (30, 10), (40, 20)])
    monkeypatch.setattr(setup, "processor_times", lambda: {"1": next(times)})
    torch.ones(1 << 17).exp()
    idle, found = IdleThreads(2), []
    for _ in range(5):
        _compute(setup.IDLE * setup.LOOK_S)
        idle.look()
        found.append(idle.asleep)
    assert found == [False, True, False, True, False]
    idle.look()  # nothing was computed, so nobody waited
    assert next(times) == (40, 20)


@pytest.mark.parametrize(("ran", "waited", "found"), [(90, 10, False), (80, 20, True), (0, 0, False)])
def test_a_share_of_waiting_is_contention(ran: int, waited: int, found: bool) -> None:
    ended, begun = {"7": (10**9, 10**6)}, {"8": (0, 10**9)}
    assert contended({"1": (5, 5)} | ended, {"1": (5 + ran, 5 + waited)} | begun) == found


def test_processor_times_are_the_kernels() -> None:
    before, thread = setup.processor_times(), str(threading.get_native_id())
    _compute(0.2)
    ran, waited = setup.processor_times()[thread]
    assert ran - before[thread][0] > 0.15e9 and waited >= before[thread][1]


def _compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


def _output(program: str) -> str:
    env = os.environ | ENVIRONMENT | {"GOMP_SPINCOUNT": SPINS}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
