"""How OpenMP's idle threads wait on a CPU: they spin while the processors are free, and sleep while others want them.

Operations of a model follow one another within some 100 us, and waking a thread that sleeps takes as long as many of
them: with threads that spin, a token of 32 samples of SmolLM2-135M took 114 ms on two idle cores instead of 165. Beside
a busy program they take the processor from the thread that is waited for: 355 ms instead of 165.

GCC's OpenMP decides it by the number of its threads: where they outnumber the processors, they wait as briefly as the
policy says (libgomp's manual, ``GOMP_SPINCOUNT``), which is not at all with ``OMP_WAIT_POLICY=PASSIVE``. So
:class:`IdleThreads` lets them sleep by threads that do nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

LOOK_S = 0.25
"""Seconds between two looks at how long this process's threads waited for processors."""
IDLE = 0.1
"""Share of a look in which so little is computed that there is nothing to choose."""
CONTENDED = 0.15
"""Share of the time, computing and waiting for a processor, that threads wait for one when others want it. It was at
most 0.013 on two idle cores, 0.08 beside a program that used a tenth of a core, and 0.27 to 0.54 beside busy ones."""


class IdleThreads:
    """Let the other threads of OpenMP sleep or spin.

    Args:
        threads: Number of threads that compute.

    Raises:
        OSError: This process does not use GCC's OpenMP.
    """

    def __init__(self, threads: int) -> None:
        self._openmp = ctypes.CDLL(_library())
        self._more = max(0, len(os.sched_getaffinity(0)) - threads) + 1
        self._end: threading.Event | None = None
        self._computed = time.process_time()
        self._times: dict[str, tuple[int, int]] | None = None

    @property
    def asleep(self) -> bool:
        """Whether they sleep as soon as they have nothing to do."""
        return self._end is not None

    def sleep(self) -> None:
        """Let them sleep as soon as they have nothing to do."""
        if self._end is not None:
            return
        self._end, begun = threading.Event(), threading.Event()
        threading.Thread(target=self._outnumber, args=(self._end, begun), name="outnumber", daemon=True).start()
        begun.wait()

    def spin(self) -> None:
        """Let them spin for a while before they sleep, from a moment on."""
        if self._end is not None:
            self._end.set()
            self._end = None

    def watch(self) -> None:
        """Choose between the two from now on, in a thread of its own."""
        threading.Thread(target=self._watch, name="idle-threads", daemon=True).start()

    def look(self) -> None:
        """Choose by what happened since the look before."""
        computed_before, self._computed = self._computed, time.process_time()
        if self._computed - computed_before < IDLE * LOOK_S:
            self._times = None
            return
        before, self._times = self._times, processor_times()
        if before is not None:
            self.sleep() if contended(before, self._times) else self.spin()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()

    def _outnumber(self, end: threading.Event, begun: threading.Event) -> None:
        """Have more threads of OpenMP than processors until the end; they end with the thread that has them."""
        nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
        self._openmp.GOMP_parallel(nothing, None, ctypes.c_uint(self._more + 1), ctypes.c_uint(0))
        begun.set()
        end.wait()


def contended(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> bool:
    """Whether others want the processors, given two looks at the times of this process's threads."""
    both = [(*before[thread], *now[thread]) for thread in before.keys() & now.keys()]
    ran = sum(ran_now - ran for ran, _, ran_now, _ in both)
    waited = sum(waited_now - waited for _, waited, _, waited_now in both)
    return waited > CONTENDED * (ran + waited)


def processor_times() -> dict[str, tuple[int, int]]:
    """Nanoseconds in which each of this process's threads ran, and waited for a processor."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
        except OSError:  # it has ended
            continue
        times[task.name] = ran, waited
    return times


def _library() -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if Path(name).name.startswith("libgomp"):
            return name
    raise OSError("no library of GCC's OpenMP is loaded")
