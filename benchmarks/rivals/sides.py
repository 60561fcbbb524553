"""The sides of a comparison: our own SDK, a program on the Tinker SDK, a bare peft loop."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradwire
import psutil

from benchmarks.rivals.peft_loop import PeftLoop
from benchmarks.rivals.servers import Server, TinkerProgram
from benchmarks.rivals.workload import ALPHA, BETAS, EPS, LEARNING_RATE, RANK, Work
from benchmarks.turns import cpu_seconds
from benchmarks.workload import Rows

Batches = list[list[Rows]]
"""The rows of each run, of each step."""


@dataclass
class Measured:
    """Of one side on one work, over its turns: milliseconds a step of a run, by the clock and of CPU; losses of steps,
    summed over the runs."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Side(ABC):
    """Somebody who trains.

    Attributes:
        name: In the table.
        processes: Whose CPU time counts, with their children's.
    """

    name: str
    processes: tuple[psutil.Process, ...]

    @abstractmethod
    async def create(self, work: Work) -> None:
        """Create the runs of this work."""

    @abstractmethod
    async def train(self, work: Work, batches: Batches) -> tuple[float, list[list[float]]]:
        """Take a step for each batch; return the seconds and each run's losses."""

    async def turn(self, work: Work, batches: Batches, into: Measured) -> None:
        """Measure one turn."""
        cpu = self._cpu_seconds()
        seconds, losses = await self.train(work, batches)
        steps = len(batches) * work.runs
        into.wall_ms.append(seconds / steps * 1e3)
        into.cpu_ms.append((self._cpu_seconds() - cpu) / steps * 1e3)
        into.losses += [sum(each) for each in zip(*losses, strict=True)]

    def _cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self.processes))


class OurSdk(Side):
    """Gradwire's own SDK, in this process."""

    def __init__(self, name: str, service: gradwire.ServiceClient, server: Server) -> None:
        self.name = name
        self._service, self._model = service, server.model
        self.processes = (server.process,)
        self.runs: dict[str, list[gradwire.TrainingClient]] = {}

    def _cpu_seconds(self) -> float:
        return super()._cpu_seconds() + time.process_time()

    async def create(self, work: Work) -> None:
        lora: Any = {"rank": RANK, "alpha": ALPHA}
        self.runs[work.name] = [
            await self._service.create_run(self._model, lora=lora, seed=seed) for seed in range(work.runs)
        ]

    async def train(self, work: Work, batches: Batches) -> tuple[float, list[list[float]]]:
        runs = self.runs[work.name]
        steps = self._awaited if work.runs == 1 else self._together
        began = time.perf_counter()
        losses = await asyncio.gather(*(steps(run, [step[i] for step in batches]) for i, run in enumerate(runs)))
        return time.perf_counter() - began, losses

    async def _awaited(self, run: gradwire.TrainingClient, steps: list[Rows]) -> list[float]:
        losses = []
        for rows in steps:
            losses.append((await run.forward_backward(_batch(rows), "cross_entropy")).loss)
            await self._step(run)
        return losses

    async def _together(self, run: gradwire.TrainingClient, steps: list[Rows]) -> list[float]:
        losses = []
        for rows in steps:
            result, step = run.forward_backward(_batch(rows), "cross_entropy"), self._step(run)
            losses.append((await result).loss)
            await step
        return losses

    def _step(self, run: gradwire.TrainingClient) -> gradwire.Future[Any]:
        return run.optim_step(learning_rate=LEARNING_RATE, betas=BETAS, eps=EPS, max_grad_norm=0.0)


def _batch(rows: Rows) -> dict[str, Any]:
    return {
        "input_ids": [row[:-1] for row in rows],
        "target_tokens": [row[1:] for row in rows],
        "weights": [[1.0] * (len(row) - 1) for row in rows],
    }


class TinkerSide(Side):
    """A program on the Tinker SDK and the server that it talks to."""

    def __init__(self, name: str, program: TinkerProgram, server: psutil.Process) -> None:
        self.name, self._program = name, program
        self.processes = (program.process, server)

    async def create(self, work: Work) -> None:
        await self._program.ask("create", name=work.name, count=work.runs)

    async def train(self, work: Work, batches: Batches) -> tuple[float, list[list[float]]]:
        done = await self._program.ask("steps", name=work.name, batches=batches)
        return done["seconds"], done["losses"]


class BareSide(Side):
    """A bare loop in this process, which begins with the adapter that our run has."""

    name = "peft loop"
    processes = ()

    def __init__(self, ours: OurSdk, model: Path, folder: Path) -> None:
        self._ours, self._model, self._folder = ours, model, folder
        self._loops: dict[str, PeftLoop] = {}

    def _cpu_seconds(self) -> float:
        return time.process_time()

    async def create(self, work: Work) -> None:
        (run,) = self._ours.runs[work.name]
        adapter = await run.export(self._folder / f"{work.rows}x{work.tokens}")
        self._loops[work.name] = PeftLoop(self._model, adapter)

    async def train(self, work: Work, batches: Batches) -> tuple[float, list[list[float]]]:
        loop = self._loops[work.name]
        began = time.perf_counter()
        losses = [loop.step(rows) for (rows,) in batches]
        return time.perf_counter() - began, [losses]
