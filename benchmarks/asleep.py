"""Where the threads that compute spend a step: busy, waiting for a core, or asleep; rows of uniform lengths.

The engine behind a server, the same engine in this process, and a padded loop whose threads spin take the same steps in
turns. By the kernel's counts of each process's two busiest threads (``schedstat``, voluntary switches), per step.
A thread that is neither busy nor waits for a core sleeps: until another one is done with its half, or for work.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import gradwire

from benchmarks.in_process import InProcess
from benchmarks.machine import Spent, engine_process, spent
from benchmarks.padded_loop import LoopProcess, uniform_rows
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, train
from benchmarks.workload import Draw, Rows, standard_model

SHOWN = 2
"""Threads of each process that are shown, the busiest first."""


async def measured(size: Size) -> list[Figure]:
    draw, steps = Draw.of(0, smoke=size.smoke), size.pick(4, 2)
    found: dict[str, list[tuple[float, list[Spent]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        local = InProcess(model, Path(folder) / "state")
        with LoopProcess(model, Path(folder) / "loop", spins=True) as loop:
            async with gradwire.connect(models=[f"m={model}"]) as service:
                run = await service.create_run("m")

                async def remote(batches: list[Rows]) -> Sequence[float]:
                    return await train(run, KINDS["sft"], [KINDS["sft"].batch(rows) for rows in batches])

                async def in_process(batches: list[Rows]) -> Sequence[float]:
                    return local.train(batches)

                async def padded(batches: list[Rows]) -> Sequence[float]:
                    losses: list[float] = loop.steps(batches)["losses"]
                    return losses

                Side = tuple[int, Callable[[list[Rows]], Awaitable[Sequence[float]]]]
                sides: dict[str, Side] = {
                    "remote": (engine_process().pid, remote),
                    "in process": (os.getpid(), in_process),
                    "padded, spinning": (loop.pid, padded),
                }
                for turn in range(size.repeats + 1):
                    batches = [uniform_rows(draw) for _ in range(steps)]
                    for name, (pid, side) in sides.items():
                        before, began = spent(pid), time.perf_counter()
                        await side(batches)
                        wall, after = (time.perf_counter() - began) * 1e3, spent(pid)
                        own = [
                            Spent(*(now - then for now, then in zip(each, before.get(thread, (0, 0, 0)), strict=True)))
                            for thread, each in after.items()
                        ]
                        if turn:  # the first one warms up
                            found.setdefault(name, []).append((wall, sorted(own, reverse=True)[:SHOWN]))
    return [_figure(name, turns, steps) for name, turns in found.items()]


def _figure(name: str, turns: Sequence[tuple[float, list[Spent]]], steps: int) -> Figure:
    walls = [wall / steps for wall, _ in turns]
    threads = []
    for place in range(SHOWN):
        own = [(wall, spent[place]) for wall, spent in turns if len(spent) > place]
        busy, waited, asleep, slept = (
            statistics.median(values) / steps
            for values in zip(
                *((one.busy, one.waited, wall - one.busy - one.waited, one.slept) for wall, one in own), strict=True
            )
        )
        threads.append(f"busy {busy:.1f}, waits for a core {waited:.1f}, asleep {asleep:.1f} ({slept:.0f} times)")
    return Figure(
        f"a step of uniform rows, {name}", statistics.median(walls), "ms", detail="; ".join(threads),
        samples={"ms": walls},
    )  # fmt: skip


def measure(size: Size) -> list[Figure]:
    return asyncio.run(measured(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
