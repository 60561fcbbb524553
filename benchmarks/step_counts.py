"""What a short step costs the front's process: processor time, context switches, writes and syncs.

One row of 32 tokens on a model of 0.1 M parameters, each step awaited before the next, as a pair (both submitted, then
awaited) and as a ``train_step``. Processor time and voluntary context switches are the kernel's counts of all of the
front's threads; writes and syncs are counted by ``strace``, in steps of their own, because it slows a process down
several times. What other parts of the server do meanwhile (heartbeats, garbage collection) is counted with it.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

from benchmarks.machine import cpu_and_switches, front_process
from benchmarks.overhead import TOKENS, pair, train_step
from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import small_model

Step = Callable[[gradwire.TrainingClient, dict[str, Any]], Awaitable[float]]
WRITES = ("write", "pwrite64", "writev", "pwritev")
SYNCS = ("fsync", "fdatasync")
TARGETS = {"cpu": 1.5, "switches": 20.0, "writes": 8.0, "syncs": 1.0}


class Strace:
    """Counts the system calls of a process between :meth:`start` and :meth:`stop`."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid, self._file = pid, folder / "strace"

    async def start(self) -> bool:
        """Begin to count; False where strace is missing or may not attach to a process."""
        if shutil.which("strace") is None:
            return False
        calls = ",".join((*WRITES, *SYNCS))
        words = ["strace", "-f", "-c", "-e", f"trace={calls}", "-p", str(self._pid), "-o", str(self._file)]
        self._process = await asyncio.create_subprocess_exec(*words, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        return b"attached" in await self._process.stderr.readline()

    async def stop(self) -> dict[str, int]:
        self._process.send_signal(signal.SIGINT)
        await self._process.wait()
        counts = dict.fromkeys((*WRITES, *SYNCS), 0)
        for line in self._file.read_text().splitlines():
            words = line.split()
            if words and words[-1] in counts:
                counts[words[-1]] = int(words[3])
        return counts


async def measured(size: Size) -> list[Figure]:
    steps, batch = size.pick(200, 3), {"input_ids": np.random.default_rng(0).integers(3, 90, (1, TOKENS))}
    sides: dict[str, Step] = {"forward_backward and optim_step": pair, "train_step": train_step}
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "model", hidden_size=64, num_layers=2)
        async with gradwire.connect(models=[f"tiny={model}"], server_args=["--threads", "1"]) as service:
            run = await service.create_run("tiny")
            front = front_process()
            for name, step in sides.items():

                async def repeat(count: int, step: Step = step) -> None:
                    for _ in range(count):
                        await step(run, batch)

                await repeat(size.pick(50, 1))
                cpu, switches = list[float](), list[float]()
                for _ in range(size.repeats):
                    began = cpu_and_switches(front)
                    await repeat(steps)
                    ended = cpu_and_switches(front)
                    cpu.append((ended[0] - began[0]) / steps)
                    switches.append((ended[1] - began[1]) / steps)
                figures += [
                    _figure(name, "processor time", cpu, "ms a step", TARGETS["cpu"]),
                    _figure(name, "voluntary context switches", switches, "a step", TARGETS["switches"]),
                ]
                strace = Strace(front, Path(folder))
                if await strace.start():
                    await repeat(steps)
                    counts = await strace.stop()
                    each = ", ".join(f"{call} {count / steps:.1f}" for call, count in counts.items() if count)
                    for what, calls in (("writes", WRITES), ("syncs", SYNCS)):
                        value = sum(counts[call] for call in calls) / steps
                        figures.append(_figure(name, what, [value], "a step", TARGETS[what], each))
    return figures


def _figure(side: str, what: str, values: list[float], unit: str, target: float, detail: str = "") -> Figure:
    return Figure(
        f"front, {side}: {what}", statistics.median(values), unit, target, at_least=False,
        detail=detail or f"all threads of the front, one row of {TOKENS} tokens", samples={what: values},
    )  # fmt: skip


def measure(size: Size) -> list[Figure]:
    return asyncio.run(measured(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
