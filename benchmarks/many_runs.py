"""4,096 LoRA runs on one tiny base: creation, restart, moving, with mixed ranks, targets and alphas.

Creation is timed at the client. A restart is a new server on the same state folder, until the first operation of one of
the runs has its result. A swap is an idle run of 4 wide layers leaving the device and coming back, against copying as
many bytes there and back in one piece each; it is measured in process, on the host's memory only.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gradwire
import psutil
import torch
from gradwire_proto.v1.training_pb2 import LoraSettings, OptimStep, RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.residency import Residency
from support.server import Server
from support.tiny import tiny_model

from benchmarks.machine import engine_process, memory_bytes
from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import standard_model

TARGETS: tuple[list[str], ...] = ([], ["q_proj", "v_proj"], ["down_proj"], ["o_proj", "up_proj", "k_proj"])
EDGE = 32
ACTIVE = 64
MIB = 1 << 20


def settings(number: int) -> dict[str, Any]:
    """Rank 1 to 7, alpha 1 to 5, four choices of layers."""
    rank, alpha = 1 + number % 7, 1.0 + number % 5
    return {"rank": rank, "alpha": alpha, "target_modules": TARGETS[number % len(TARGETS)]}


async def _step(run: gradwire.TrainingClient, number: int) -> None:
    row = [(number * 7 + 5 * place) % 90 + 3 for place in range(16)]
    first = run.forward_backward([{"input_ids": row}], "causal_lm")
    step = run.optim_step(learning_rate=1e-3)
    await first
    await step


class Processes:
    """The processes of a server that has started: its front, its engine."""

    def __init__(self, server: Server) -> None:
        front = psutil.Process(server.process.pid)
        self._processes = [front, *front.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Processor time so far; resolution 10 ms."""
        return sum(sum(each.cpu_times()[:2]) for each in self._processes)


def _started(server: Server) -> tuple[Processes, str]:
    """Start a server; return its processes, and in words what that took."""
    began = time.perf_counter()
    server.start()
    taken, processes = time.perf_counter() - began, Processes(server)
    return processes, f"{taken:.1f} s to start ({processes.cpu_seconds():.1f} of processors)"


async def service_figures(size: Size, count: int) -> list[Figure]:
    """The figures of a server with this number of runs."""
    edge = min(EDGE, count // 2 - 1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model")
        flags = ["--limit", f"max_runs={count}", "--limit", f"key_runs={count}"]
        flags += ["--run-memory", "8 MiB", "--run-host-memory", "8 MiB"]
        server = Server(model, Path(folder) / "state", *flags)
        processes, empty = _started(server)
        seconds, cpu, run_ids = list[float](), list[float](), list[str]()
        try:
            async with gradwire.connect(server.address) as service:
                for number in range(count):
                    used, began = processes.cpu_seconds(), time.perf_counter()
                    run = await service.create_run("tiny", lora=settings(number), seed=number)
                    seconds.append(time.perf_counter() - began)
                    cpu.append(processes.cpu_seconds() - used)
                    run_ids.append(run.run_id)
                    if number == 0:
                        await _step(run, 0)
                        engine = engine_process()
                        before = memory_bytes(engine, "VmRSS")
            for first in range(0, count, ACTIVE):
                async with gradwire.connect(server.address) as service:
                    runs = map(service.get_training_client, run_ids[first : first + ACTIVE])
                    await asyncio.gather(*(_step(run, first) for run in runs))
            grown = memory_bytes(engine, "VmRSS") - before
        finally:
            server.end()
        server = Server(model, Path(folder) / "state", *flags)
        began = time.perf_counter()
        processes, full = _started(server)
        try:
            async with gradwire.connect(server.address) as service:
                await _step(service.get_training_client(run_ids[-1]), 1)
                restart, used = time.perf_counter() - began, processes.cpu_seconds()
        finally:
            server.end()
    early, late = statistics.median(seconds[1 : 1 + edge]), statistics.median(seconds[-edge:])
    detail = f"medians of {edge}: {early * 1e3:.1f} ms from the second on, {late * 1e3:.1f} ms up to run {count:,}"
    cpu_early, cpu_late = statistics.mean(cpu[1 : 1 + edge]), statistics.mean(cpu[-edge:])
    detail += f"; longest {max(seconds[1:]) * 1e3:.0f} ms; of the server's processors {cpu_early * 1e3:.1f} and"
    detail += f" {cpu_late * 1e3:.1f} ms"
    taken = f"{count:,} runs, a step of each, {ACTIVE} at a time; --run-memory and --run-host-memory of 8 MiB each"
    until = f"until the first step's result, {used:.1f} s of processors; {full}; without runs {empty}"
    return [
        Figure(f"creating run {count:,} against run 2", late / early, "x", 1.5, at_least=False, detail=detail),
        Figure("creating a run", late * 1e3, "ms", 40, at_least=False, detail=f"run {count:,}, awaited"),
        Figure(f"restart with {count:,} runs", restart, "s", 10, at_least=False, detail=until),
        Figure("memory of an idle run in the engine", grown / count / 1024, "KiB", detail=taken),
    ]


def swap(size: Size) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        wide = {"hidden_size": 64} if size.smoke else {"hidden_size": 1024, "num_layers": 4}
        pool = ModelPool({"m": str(standard_model(Path(folder) / "model", smoke=size.smoke, **wide))})
        runs = []
        for number in range(2):
            config = RunConfig(base_model="m", seed=number, lora=LoraSettings(rank=size.pick(64, 4)))
            run = EngineRun(pool, f"run-{number}", config)
            gradients = {name: torch.ones_like(each) for name, each in run.policy.masters().items()}
            run.accumulator.merge({("loss", "tokens"): gradients}, {("loss", "tokens"): 1.0})
            run.optimizer.step(run.accumulator, OptimStep(learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8))
            runs.append(run)
        nbytes = runs[0].nbytes
        moving = Residency(Path(folder) / "spilled", nbytes, 4 * nbytes)
        for run in runs:
            moving.add(run)
        piece = torch.ones(nbytes, dtype=torch.uint8)
        ratios, swaps = [], []
        for turn in range(2 * size.repeats + 1):
            start = time.perf_counter()
            moving.use(runs[turn % 2])
            middle = time.perf_counter()
            piece.clone()
            piece.clone()
            ratios.append((middle - start) / (time.perf_counter() - middle))
            swaps.append(middle - start)
        moving.close()
    detail = f"{nbytes / MIB:.0f} MiB of weights and moments out, as many in: {statistics.median(swaps) * 1e3:.1f} ms"
    ratio = statistics.median(ratios[1:])
    return Figure("a swap against copying its bytes", ratio, "x", 1.5, at_least=False, detail=detail)


def measure(size: Size) -> list[Figure]:
    return [*asyncio.run(service_figures(size, size.pick(4096, 3 * EDGE))), swap(size)]


if __name__ == "__main__":
    run_alone(measure, __doc__)
