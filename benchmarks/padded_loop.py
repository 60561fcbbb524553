"""Full fine-tuning compared with the common training loop: pad to the longest, model(labels=...), backward, clip,
AdamW.

Both train the same model on the same rows, in turns: ours through the SDK and a server on loopback, theirs in a process
of its own, with as many threads and the same fused AdamW. Their losses are compared step by step. Rows are drawn as in
the other benchmarks (log-normal lengths), and with lengths uniform between 32 and 512; there, the loop's OpenMP waits
as it does where nobody says otherwise: its threads spin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import ROOT
from benchmarks.other_side import WAITING, OtherSide
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, LEARNING_RATE, train
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import LONGEST, ROWS, SHORTEST, Draw, Rows, num_tokens, standard_model

IGNORED = -100


class PaddedLoop:
    """The model and its optimizer; ``step`` takes a batch of token rows and gives the loss."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, rows: Rows) -> float:
        loss = self.loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def loss(self, rows: Rows) -> torch.Tensor:
        """The mean loss of the rows' tokens, with its graph."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        labels = ids.masked_fill(mask == 0, IGNORED)
        return self.model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


class LoopProcess(OtherSide):
    """A :class:`PaddedLoop` in a process of its own.

    Args:
        spins: Whether its OpenMP threads wait as they do by default, not as the engine's.
    """

    def __init__(self, model: Path, folder: Path, *, spins: bool) -> None:
        folder.mkdir()
        waiting = [word for name in WAITING for word in (["-u", name] if spins else [f"{name}={WAITING[name]}"])]
        command = ["env", *waiting, sys.executable, "-m", "benchmarks.padded_loop", "side", str(model)]
        super().__init__("the padded loop", command, folder, {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})

    def steps(self, batches: list[Rows]) -> dict[str, Any]:
        """Take a step on each batch; return ``seconds``, ``cpu_seconds`` and ``losses``."""
        return self.ask(json.dumps(batches))


def side(model: Path) -> None:
    """Answer lines with batches by lines with their steps, until the input ends."""
    loop = PaddedLoop(model)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        losses = [loop.step(rows) for rows in json.loads(line)]
        times = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(times | {"losses": losses}), flush=True)


def uniform_rows(draw: Draw) -> Rows:
    """A batch whose rows' lengths are uniform between the shortest and the longest."""
    scale = 0.1 if draw.smoke else 1.0
    lengths = draw.rng.integers(int(SHORTEST * scale), int(LONGEST * scale) + 1, ROWS)
    return [draw.tokens(length) for length in lengths.tolist()]


async def compare(size: Size, name: str, batches: list[Rows], target: float, *, spins: bool) -> Figure:
    steps = len(batches) // (size.repeats + 1)
    turns = Turns("ours", "padded")
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        with LoopProcess(model, Path(folder) / "loop", spins=spins) as loop:
            async with gradwire.connect(models=[f"m={model}"]) as service:
                run = await service.create_run("m")
                for turn in range(size.repeats + 1):
                    chosen = batches[turn * steps : (turn + 1) * steps]
                    tokens = sum(map(num_tokens, chosen))
                    with turns.turn("ours", tokens):
                        ours = await train(run, KINDS["sft"], [KINDS["sft"].batch(rows) for rows in chosen])
                    theirs = loop.steps(chosen)
                    turns.add("padded", tokens, theirs["seconds"], theirs["cpu_seconds"])
                    check_losses(ours, theirs["losses"])
    turns.drop_first()
    padding = np.mean([len(rows) * max(map(len, rows)) / num_tokens(rows) for rows in batches])
    detail = f"{turns.said('tokens')}; the loop computes {padding:.2f} tokens for each that exists; losses equal"
    return Figure(name, turns.ratio(), "x", target, detail=detail, samples=turns.rates)


def measure(size: Size) -> list[Figure]:
    draw, count = Draw.of(0, smoke=size.smoke), (size.repeats + 1) * size.pick(3, 2)
    rows = [draw.rows() for _ in range(count)]
    even = [uniform_rows(draw) for _ in range(count)]
    cases: list[tuple[str, list[Rows], float, bool]] = [
        ("against a padded PyTorch loop", rows, 1.9, False),
        ("against a padded PyTorch loop, uniform lengths", even, 2.0, True),
    ]
    return [
        asyncio.run(compare(size, name, batches, target, spins=spins))
        for name, batches, target, spins in cases
        if size.wants(name)
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side(Path(sys.argv[2]))
    else:
        run_alone(measure, __doc__)
