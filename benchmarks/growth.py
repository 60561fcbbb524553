"""Growth of a step's time with 1, 4 and 16 times the rows, the tokens per row, or the runs.

A straight line is fitted to the three medians, by least squares of the relative error; the figure is the largest
distance of a median from it, in per cent. Attention is quadratic in a row's tokens: what it adds is in the figure.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import gradwire
import numpy as np

from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, train
from benchmarks.workload import Draw, standard_model

FACTORS = (1, 4, 16)
ROWS, TOKENS = 4, 32


def deviation(factors: tuple[int, ...], seconds: list[float]) -> float:
    """The largest relative distance of a point from the fitted line, in per cent."""
    design = np.stack([np.ones(len(factors)), np.array(factors, float)], axis=1) / np.array(seconds)[:, None]
    line, *_ = np.linalg.lstsq(design, np.ones(len(factors)), rcond=None)
    return float(np.abs(design @ line - 1).max() * 100)


async def grow(size: Size) -> list[Figure]:
    source = Draw.of(8, smoke=size.smoke)

    def batch(rows: int, tokens: int) -> dict[str, list[list[int]]]:
        return KINDS["sft"].batch([source.tokens(tokens) for _ in range(rows)])

    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m")
            many = [await service.create_run("m", lora=8, seed=seed) for seed in range(FACTORS[-1])]

            async def rows(factor: int) -> None:
                await train(run, KINDS["sft"], [batch(ROWS * factor, 4 * TOKENS)])

            async def tokens(factor: int) -> None:
                await train(run, KINDS["sft"], [batch(ROWS, TOKENS * factor)])

            async def runs(factor: int) -> None:
                share = batch(ROWS, 4 * TOKENS)
                await asyncio.gather(*(train(each, KINDS["sft"], [share]) for each in many[:factor]))

            return [await _figure(name, grown, size) for name, grown in
                    (("rows", rows), ("tokens of a row", tokens), ("runs", runs))]  # fmt: skip


async def _figure(name: str, step: Callable[[int], Awaitable[None]], size: Size) -> Figure:
    seconds: dict[int, list[float]] = {factor: [] for factor in FACTORS}
    for turn in range(size.repeats + 1):
        for factor in FACTORS:
            start = time.perf_counter()
            await step(factor)
            if turn:
                seconds[factor].append(time.perf_counter() - start)
    medians = [statistics.median(seconds[factor]) for factor in FACTORS]
    said = ", ".join(f"{factor} x: {median * 1e3:,.0f} ms" for factor, median in zip(FACTORS, medians, strict=True))
    return Figure(
        f"growth with {name}: off a straight line",
        deviation(FACTORS, medians),
        "%",
        detail=f"a step at {said}",
        samples={str(factor): values for factor, values in seconds.items()},
    )


def measure(size: Size) -> list[Figure]:
    return asyncio.run(grow(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
