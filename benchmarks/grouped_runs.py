"""Sixteen LoRA runs with one row of 64 tokens each: their steps at once with ``--group-runs on``, against one after
another on the same server, and their samples likewise.

Each side has its own sixteen runs, equal at first, and trains them on the same rows, so that the losses can be compared
step by step. *At once*: a ``train_step`` of every run, submitted before the first result is awaited. *One after
another*: each run's result is awaited before the next run's step is submitted, as a loop over runs is written.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradwire

from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import LEARNING_RATE
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, Rows, standard_model

RUNS, TOKENS = 16, 64
SHAPES = {
    "128 units, 2 layers, rank 8": (128, 2, 8),
    "256 units, 4 layers, rank 16": (256, 4, 16),
    "512 units, 8 layers, rank 32": (512, 8, 32),
}
"""Hidden size, layers and rank."""

Runs = Sequence[gradwire.TrainingClient]


def _step(run: gradwire.TrainingClient, row: list[int]) -> Any:
    return run.train_step({"input_ids": [row]}, "causal_lm", learning_rate=LEARNING_RATE)


async def at_once(runs: Runs, rows: Rows) -> list[float]:
    steps = [_step(run, row) for run, row in zip(runs, rows, strict=True)]
    return [(await step).loss for step in steps]


async def in_turn(runs: Runs, rows: Rows) -> list[float]:
    return [(await _step(run, row)).loss for run, row in zip(runs, rows, strict=True)]


async def training(together: Runs, separate: Runs, name: str, size: Size, draw: Draw) -> Figure:
    turns, steps = Turns("at once", "in turn"), size.pick(6, 1)
    for _ in range(size.repeats + 1):
        batches = [[draw.tokens(TOKENS) for _ in range(RUNS)] for _ in range(steps)]
        with turns.turn("at once", steps * RUNS * TOKENS):
            ours = [loss for rows in batches for loss in await at_once(together, rows)]
        with turns.turn("in turn", steps * RUNS * TOKENS):
            theirs = [loss for rows in batches for loss in await in_turn(separate, rows)]
        check_losses(ours, theirs)
    turns.drop_first()
    title = f"sixteen LoRA runs at once against one after another, {name}"
    return Figure(title, turns.ratio(), "x", 3, detail=f"{turns.said('tokens')}; losses equal", samples=turns.rates)


async def sampling(runs: Runs, name: str, size: Size, draw: Draw) -> Figure:
    turns, length = Turns("at once", "in turn"), size.pick(48, 4)
    equal = []
    for turn in range(size.repeats + 1):
        prompts = [draw.tokens(32) for _ in runs]

        def sample(number: int, turn: int = turn, prompts: Rows = prompts) -> Any:
            return runs[number].sample([prompts[number]], max_tokens=length, seed=turn, ignore_eos=True)

        with turns.turn("at once", RUNS * length):
            futures = [sample(number) for number in range(RUNS)]
            ours = [await future for future in futures]
        with turns.turn("in turn", RUNS * length):
            theirs = [await sample(number) for number in range(RUNS)]
        tokens = [[each.samples[0][0].token_ids.tolist() for each in side] for side in (ours, theirs)]
        equal += [mine == other for mine, other in zip(*tokens, strict=True)]
    if sum(equal) < 0.95 * len(equal):  # a draw on the boundary of two tokens may fall to either side by rounding
        raise AssertionError(f"only {sum(equal)} of {len(equal)} samples at once are those drawn alone")
    turns.drop_first()
    detail = f"{length} tokens each; {turns.said('tokens')}; {sum(equal)} of {len(equal)} samples equal"
    title = f"samples of sixteen LoRA runs at once against one after another, {name}"
    return Figure(title, turns.ratio(), "x", detail=detail, samples=turns.rates)


async def compare(size: Size) -> list[Figure]:
    figures = []
    for name, (hidden_size, num_layers, rank) in SHAPES.items():
        if not size.wants(name) or (size.smoke and figures):
            continue
        draw = Draw.of(11, smoke=size.smoke)
        with tempfile.TemporaryDirectory() as folder:
            shape = {} if size.smoke else {"hidden_size": hidden_size, "num_layers": num_layers}
            model = standard_model(Path(folder) / "model", smoke=size.smoke, **shape)
            flags = ["--group-runs", "on", "--limit", "key_runs=64"]
            async with gradwire.connect(models=[f"m={model}"], server_args=flags) as service:
                runs = [
                    await service.create_run("m", lora={"rank": rank}, seed=number % RUNS) for number in range(2 * RUNS)
                ]
                figures.append(await training(runs[:RUNS], runs[RUNS:], name, size, draw))
                figures.append(await sampling(runs[:RUNS], name, size, draw))
    return figures


def measure(size: Size) -> list[Figure]:
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
