"""What the way to the engine and back costs: over loopback, with the journal on, on a tiny model.

    python benchmarks/overhead.py [--repeats 5]

``awaited``: forward_backward and optim_step of one row of 32 tokens on a model of 0.1 M parameters, each awaited
before the next: milliseconds a step that are not the engine's computing. ``pipelined``: 32 operations in flight with a
loss that costs nothing, in the real engine: operations a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from _support.small_model import small_model

LIMIT_MS, LIMIT_RATE = 4.0, 1000.0
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


@dataclass(frozen=True)
class Overhead:
    """Medians over the repeats, and what they are of.

    Attributes:
        awaited_ms: milliseconds a step, wall minus engine compute.
        pipelined: operations a second.
    """

    awaited_ms: float
    pipelined: float
    each_awaited_ms: list[float]
    each_pipelined: list[float]


async def awaited(run: gradwire.TrainingClient, batch: dict[str, Any], steps: int) -> float:
    """Median milliseconds a step, less what the engine computed."""
    overheads = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = await run.forward_backward(batch, "causal_lm")
        step = await run.optim_step(learning_rate=1e-5)
        overheads.append(time.perf_counter() - began - loss.timings.engine_s - step.timings.engine_s)
    return statistics.median(overheads) * 1e3


async def pipelined(run: gradwire.TrainingClient, batch: dict[str, Any], operations: int) -> float:
    """Operations a second, up to 32 submitted ahead of the one that is awaited."""
    waiting: deque[gradwire.Future[Any]] = deque()
    began = time.perf_counter()
    for _ in range(operations):
        if len(waiting) == IN_FLIGHT:
            await waiting.popleft()
        waiting.append(run.forward_backward(batch, "free"))
    while waiting:
        await waiting.popleft()
    return operations / (time.perf_counter() - began)


async def _measure(folder: Path, repeats: int, steps: int, operations: int) -> Overhead:
    model = small_model(folder / "model", hidden_size=64, num_layers=2)
    losses = folder / "free.py"
    losses.write_text(FREE_LOSS)
    batch = {"input_ids": np.random.default_rng(0).integers(3, 90, (1, TOKENS))}
    step_ms, rates = [], []
    server_args = ["--losses", str(losses), "--threads", "1"]
    async with gradwire.connect(models=[f"tiny={model}"], server_args=server_args) as service:
        run = await service.create_run("tiny")
        await awaited(run, batch, 20)
        await pipelined(run, batch, 200)
        for _ in range(repeats):
            step_ms.append(await awaited(run, batch, steps))
            rates.append(await pipelined(run, batch, operations))
    return Overhead(statistics.median(step_ms), statistics.median(rates), step_ms, rates)


def measure(repeats: int = 5, steps: int = 200, operations: int = 2000) -> Overhead:
    """Both figures, from one server that is started for it and ended."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), repeats, steps, operations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    found = measure(parser.parse_args().repeats)
    each = ", ".join(f"{value:.2f}" for value in found.each_awaited_ms)
    print(f"awaited step, wall minus engine: {found.awaited_ms:.2f} ms (at most {LIMIT_MS:g}); each: {each}")
    each = ", ".join(f"{value:.0f}" for value in found.each_pipelined)
    print(
        f"pipelined, {IN_FLIGHT} in flight: {found.pipelined:.0f} operations/s (at least {LIMIT_RATE:g}); each: {each}"
    )


if __name__ == "__main__":
    main()
