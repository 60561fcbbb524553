"""The service's overhead per operation: over loopback, with the journal on, on a tiny model.

Steps of one row of 32 tokens on a model of 0.1 M parameters, each awaited before the next: milliseconds a step that are
not the engine's computing, with forward_backward and optim_step awaited one after the other, with both submitted before
the first is awaited, and as a train_step; by turns. ``pipelined``: 32 operations in flight with a loss that costs
nothing, in the real engine: operations a second. What a step costs the front: :mod:`.step_counts`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

from benchmarks.machine import cpu_and_switches, engine_process, front_process
from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import small_model

IN_FLIGHT = 32
TOKENS = 32

FREE_LOSS = '''
"""A loss that needs no scores, and so no model."""

import torch
from gradwire_losses.fields import INPUT_IDS
from gradwire_losses.outputs import LossOutput, Term
from gradwire_losses.registry import register_loss


@register_loss("free", fields=[INPUT_IDS], scores=(), metrics={}, reference="none", formula="0", streams=True)
def free(batch, scores, config):
    """Nothing."""
    return LossOutput(terms={"zero": Term(torch.zeros(()), 1.0, "sum")}, metrics={})
'''


async def awaited(run: gradwire.TrainingClient, batch: dict[str, Any]) -> float:
    """Take a step whose two operations are awaited one after the other; return the engine's seconds."""
    loss = await run.forward_backward(batch, "causal_lm")
    step = await run.optim_step(learning_rate=1e-5)
    return loss.timings.engine_s + step.timings.engine_s


async def pair(run: gradwire.TrainingClient, batch: dict[str, Any]) -> float:
    """Take a step whose two operations are submitted before the first is awaited; return the engine's seconds."""
    loss, step = run.forward_backward(batch, "causal_lm"), run.optim_step(learning_rate=1e-5)
    return (await loss).timings.engine_s + (await step).timings.engine_s


async def train_step(run: gradwire.TrainingClient, batch: dict[str, Any]) -> float:
    """Take a step as one operation; return the engine's seconds."""
    done = await run.train_step(batch, "causal_lm", learning_rate=1e-5)
    return done.timings.engine_s


async def overhead(
    step: Callable[[gradwire.TrainingClient, dict[str, Any]], Awaitable[float]],
    run: gradwire.TrainingClient,
    batch: dict[str, Any],
    steps: int,
) -> float:
    """Median milliseconds per step, minus the engine's compute time."""
    overheads = []
    for _ in range(steps):
        began = time.perf_counter()
        engine_s = await step(run, batch)
        overheads.append(time.perf_counter() - began - engine_s)
    return statistics.median(overheads) * 1e3


async def pipelined(run: gradwire.TrainingClient, batch: dict[str, Any], operations: int) -> float:
    """Measure operations per second with up to 32 submitted ahead of the awaited one."""
    waiting: deque[gradwire.Future[Any]] = deque()
    began = time.perf_counter()
    for _ in range(operations):
        if len(waiting) == IN_FLIGHT:
            await waiting.popleft()
        waiting.append(run.forward_backward(batch, "free"))
    while waiting:
        await waiting.popleft()
    return operations / (time.perf_counter() - began)


def processes() -> dict[str, int]:
    """The process ids of client, front and engine."""
    return {"client": os.getpid(), "front": front_process(), "engine": engine_process().pid}


async def both(size: Size) -> list[Figure]:
    steps, operations = size.pick(200, 10), size.pick(2000, 100)
    batch = {"input_ids": np.random.default_rng(0).integers(3, 90, (1, TOKENS))}
    sides = {"awaited": (awaited, 3.5), "submitted, then awaited": (pair, None), "train_step": (train_step, 2.5)}
    step_ms: dict[str, list[float]] = {name: [] for name in sides}
    rates, cpu_ms = list[float](), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "model", hidden_size=64, num_layers=2)
        losses = Path(folder) / "free.py"
        losses.write_text(FREE_LOSS)
        server_args = ["--losses", str(losses), "--threads", "1"]
        async with gradwire.connect(models=[f"tiny={model}"], server_args=server_args) as service:
            run = await service.create_run("tiny")
            for step, _ in sides.values():
                await overhead(step, run, batch, steps // 10)
            await pipelined(run, batch, operations // 10)
            for _ in range(size.repeats):
                for name, (step, _) in sides.items():
                    step_ms[name].append(await overhead(step, run, batch, steps))
                began = {name: cpu_and_switches(pid)[0] for name, pid in processes().items()}
                rates.append(await pipelined(run, batch, operations))
                for name, pid in processes().items():
                    cpu_ms.setdefault(name, []).append((cpu_and_switches(pid)[0] - began[name]) / operations)
    return [
        *(
            Figure(
                f"overhead of the service, {name}",
                statistics.median(step_ms[name]),
                "ms a step",
                target,
                at_least=False,
                detail=f"wall less engine compute of a step, {TOKENS} tokens, median of {steps}",
                samples={"ms": step_ms[name]},
            )
            for name, (_, target) in sides.items()
        ),
        Figure(
            "operations in a pipeline",
            statistics.median(rates),
            "operations/s",
            2000.0,
            detail=f"{IN_FLIGHT} in flight, a loss that costs nothing; ms of CPU an operation: "
            + ", ".join(f"{statistics.median(each):.2f} {name}" for name, each in cpu_ms.items()),
            samples={"operations/s": rates, **cpu_ms},
        ),
    ]


def measure(size: Size) -> list[Figure]:
    return asyncio.run(both(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
