"""Our side of a comparison: batches for the losses, a run on a server of its own, one training loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradwire

from benchmarks.report import Size
from benchmarks.workload import Rows

LEARNING_RATE = 1e-4
OPERATIONS = 100
"""Operations of a turn of :func:`empty_operations`."""
BETA = {"dpo": 0.1, "grpo": 0.04}


def sft_batch(rows: Rows) -> dict[str, Any]:
    return {"input_ids": rows}


def dpo_batch(pairs: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    return {
        "chosen_input_ids": [pair["prompt"] + pair["chosen"] for pair in pairs],
        "rejected_input_ids": [pair["prompt"] + pair["rejected"] for pair in pairs],
        "prompt_lengths": [len(pair["prompt"]) for pair in pairs],
    }


def grpo_batch(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "prompt_ids": [group["prompt"] for group in groups],
        "response_ids": [group["responses"] for group in groups],
        "response_masks": [[[1] * len(one) for one in group["responses"]] for group in groups],
        "rewards": [group["rewards"] for group in groups],
    }


@dataclass(frozen=True)
class Kind:
    """A kind of training: its loss, the arguments of the loss, and its batches."""

    loss: str
    kwargs: dict[str, Any]
    batch: Any


KINDS = {
    "sft": Kind("causal_lm", {}, sft_batch),
    "dpo": Kind("dpo", {"beta": BETA["dpo"], "reference_model": "base"}, dpo_batch),
    "grpo": Kind("grpo", {"beta": BETA["grpo"], "reference_model": "base"}, grpo_batch),
}


async def train(run: gradwire.TrainingClient, kind: Kind, batches: Sequence[dict[str, Any]]) -> list[float]:
    """Take one step per batch, all submitted before the first result is awaited; return the losses."""
    steps = [
        (run.forward_backward(batch, kind.loss, kind.kwargs), run.optim_step(learning_rate=LEARNING_RATE))
        for batch in batches
    ]
    losses = []
    for loss, step in steps:
        losses.append((await loss).loss)
        await step
    return losses


async def empty_operations(runs: Mapping[str, gradwire.TrainingClient], size: Size) -> dict[str, list[float]]:
    """Milliseconds of an awaited operation that computes nothing, by turns: the median of each turn but the first."""
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(size.repeats + 1):
        for name, run in runs.items():
            seconds = []
            for _ in range(size.pick(OPERATIONS, 5)):
                began = time.perf_counter()
                await run.zero_grad()
                seconds.append(time.perf_counter() - began)
            if turn:
                medians[name].append(statistics.median(seconds) * 1e3)
    return medians
