"""Full fine-tuning compared with the common training loop: pad to the longest, model(labels=...), backward, clip,
AdamW.

Both train the same model on the same rows, in turns: ours through the SDK and a server on loopback, theirs in this
process, with as many threads and the same fused AdamW. Their losses are compared step by step first.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import gradwire
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, LEARNING_RATE, train
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, Rows, num_tokens, standard_model

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


async def compare(size: Size) -> list[Figure]:
    steps = size.pick(3, 2)
    draw = Draw.of(0, smoke=size.smoke)
    batches = [draw.rows() for _ in range((size.repeats + 1) * steps)]
    turns = Turns("ours", "padded")
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        theirs = PaddedLoop(model)
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m")
            for turn in range(size.repeats + 1):
                chosen = batches[turn * steps : (turn + 1) * steps]
                tokens = sum(map(num_tokens, chosen))
                with turns.turn("ours", tokens):
                    ours = await train(run, KINDS["sft"], [KINDS["sft"].batch(rows) for rows in chosen])
                with turns.turn("padded", tokens):
                    losses = [theirs.step(rows) for rows in chosen]
                check_losses(ours, losses)
    turns.drop_first()
    padding = np.mean([len(rows) * max(map(len, rows)) / num_tokens(rows) for rows in batches])
    detail = f"{turns.said('tokens')}; the loop computes {padding:.2f} tokens for each that exists; losses equal"
    return [Figure("against a padded PyTorch loop", turns.ratio(), "x", 1.9, detail=detail, samples=turns.rates)]


def measure(size: Size) -> list[Figure]:
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
