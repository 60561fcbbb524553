"""Full fine-tuning at a vocabulary of 131,072, compared with two loops in plain PyTorch.

The model has one layer of width 512, so that nearly all the arithmetic is the output head's. Both loops pad the rows
for the trunk. One computes all logits and the loss by ``model(labels=...)``; the other takes the hidden states of the
real tokens to ``torch.nn.functional.linear_cross_entropy`` (torch 2.13), which holds few logits at once. All three
train the same model on the same rows, in turns, and their losses are compared step by step.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import gradwire
import torch

from benchmarks.padded_loop import PaddedLoop
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, train
from benchmarks.turns import Turns, check_losses, cpu_seconds
from benchmarks.workload import Draw, Rows, num_tokens, standard_model

NUM_ROWS = 8


class LinearLoop(PaddedLoop):
    """The loop with ``linear_cross_entropy`` on the hidden states before the real tokens."""

    def loss(self, rows: Rows) -> torch.Tensor:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True).bool()
        hidden = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        before, scored = hidden[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]]
        return torch.nn.functional.linear_cross_entropy(before, self.model.lm_head.weight, scored)


async def compare(size: Size) -> list[Figure]:
    vocabulary = size.pick(128 * 1024, 4096)
    draw = Draw.of(5, smoke=size.smoke)
    batches = [draw.rows(NUM_ROWS) for _ in range(size.repeats + 1)]
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(
            Path(folder) / "model",
            characters="".join(chr(0x10000 + index) for index in range(vocabulary - 4)),
            hidden_size=size.pick(512, 32),
            num_layers=1,
        )
        loops = {"a padded loop": (PaddedLoop(model), 1.5)}
        if hasattr(torch.nn.functional, "linear_cross_entropy"):  # from torch 2.13 on
            loops["linear_cross_entropy"] = (LinearLoop(model), 1.1)
        sides = {name: Turns("ours", "theirs") for name in loops}
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m")
            for rows in batches:
                tokens = num_tokens(rows)
                wall, cpu = time.perf_counter(), cpu_seconds()
                ours = await train(run, KINDS["sft"], [KINDS["sft"].batch(rows)])
                wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
                for name, (loop, _) in loops.items():
                    sides[name].add("ours", tokens, wall, cpu)
                    with sides[name].turn("theirs", tokens):
                        losses = [loop.step(rows)]
                    check_losses(ours, losses)
    figures = []
    for name, (_, target) in loops.items():
        turns = sides[name]
        turns.drop_first()
        detail = f"{turns.said('tokens')}; losses equal"
        title = f"a vocabulary of {vocabulary:,} against {name}"
        figures.append(Figure(title, turns.ratio(), "x", target, detail=detail, samples=turns.rates))
    return figures


def measure(size: Size) -> list[Figure]:
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
