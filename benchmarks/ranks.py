"""Training on one, two and more ranks: tokens a second, by turns on servers that run at the same time.

    python -m benchmarks.ranks [--repeats 5] [--smoke]

On a CPU each rank has one thread, and a machine needs as many idle cores as ranks for the figures to mean something.
``--ranks 1`` is an engine of one process: no process is started beside it and no collective is called, so that nothing
remains to be compared. Two engines of one process each, which share nothing and train at the same time, say what the
machine's two cores give at most. The cost of a decision is that of an operation that computes nothing, on two ranks and
on one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gradwire

from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, empty_operations, train
from benchmarks.turns import Turns
from benchmarks.workload import Draw, standard_model

TARGETS = {"lora": 1.8, "full": 1.8}
OVERHEAD_MS = 0.3
LORA_RANK, LANES, ROWS = 8, 2, 16
ONE, MORE, OTHER = "1 rank", "2 ranks", "1 rank of another server"
APART = "two engines that share nothing"


async def by_turns(model: Path, size: Size) -> list[Figure]:
    """Figures of engines of one process and one of two ranks."""
    async with AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(
                gradwire.connect(
                    models=[f"m={model}"],
                    server_args=["--device", "cpu", "--threads", "1", "--ranks", name.split()[0]],
                    connect_timeout=300,
                )
            )
            for name in (ONE, MORE, OTHER)
        }
        figures = [figure for tuning in TARGETS for figure in await _training(services, tuning, size)]
        return [*figures, await _overhead(services, size)]


async def _training(services: dict[str, gradwire.ServiceClient], tuning: str, size: Size) -> list[Figure]:
    source, turns = Draw.of(8, smoke=size.smoke), Turns(MORE, ONE, APART)
    lora = LORA_RANK if tuning == "lora" else None
    sides = {ONE: [ONE], MORE: [MORE], APART: [ONE, OTHER]}
    runs = {
        side: [await services[name].create_run("m", lora=lora, seed=1, lanes=LANES) for name in names]
        for side, names in sides.items()
    }
    losses: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(size.repeats + 1):
        batches = [KINDS["sft"].batch(source.rows(4 if size.smoke else ROWS)) for _ in range(2)]
        tokens = sum(len(row) for batch in batches for row in batch["input_ids"])
        for side, its_runs in runs.items():
            with turns.turn(side, tokens * len(its_runs)):
                found = await asyncio.gather(*(train(run, KINDS["sft"], batches) for run in its_runs))
            losses[side] += found[0]
    turns.drop_first()
    same = "the same bits" if losses[ONE] == losses[MORE] else "losses differ"
    load = f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    return [
        Figure(
            f"{tuning}: two ranks against one",
            turns.ratio(),
            "x",
            TARGETS[tuning],
            detail=f"{turns.said('tokens')}; {same}; {load}",
            samples=turns.rates,
        ),
        Figure(f"{tuning}: {APART} against one", turns.ratio(APART), "x", detail=load),
    ]


async def _overhead(services: dict[str, gradwire.ServiceClient], size: Size) -> Figure:
    """Milliseconds that handing on and agreeing on an operation takes, from one that computes nothing."""
    runs = {name: await service.create_run("m", lora=1, lanes=1) for name, service in services.items()}
    medians = await empty_operations(runs, size)
    more, one = (statistics.median(medians[name]) for name in (MORE, ONE))
    return Figure(
        "an operation that computes nothing: two ranks over one",
        max(more - one, 0.0),
        "ms",
        OVERHEAD_MS,
        at_least=False,
        detail=f"{more:.2f} and {one:.2f} ms; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
        samples=medians,
    )


def measure(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(by_turns(standard_model(Path(folder) / "model", smoke=size.smoke), size))


def efficiency(rates: Sequence[tuple[int, dict[str, Any]]]) -> dict[int, float]:
    """Tokens per second and rank, over those of the fewest ranks.

    Args:
        rates: Number of ranks and result of a case, the fewest first.
    """
    measured = [(ranks, found["tokens_per_second"]) for ranks, found in rates if "tokens_per_second" in found]
    return {ranks: rate / ranks * measured[0][0] / measured[0][1] for ranks, rate in measured}


if __name__ == "__main__":
    run_alone(measure, __doc__)
