"""Which examples go through the model together.

Examples are taken longest first, so that neighbours have similar lengths and little is padded, into micro-batches
whose padded size stays within a budget of tokens. An example (a pair, a group) is never split. The plan depends on
the batch and the budget alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gradwire_losses.batch import Batch, segment_ids
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """What one operation may hold at a time.

    Attributes:
        microbatch_tokens: tokens of a micro-batch, padding included. An example larger than that goes alone.
        activation_bytes: of activations kept for a later backward.
        logits_elements: of logits in memory at once.
    """

    microbatch_tokens: int = 4096
    activation_bytes: int = 2 << 30
    logits_elements: int = 1 << 22


@dataclass(frozen=True)
class MicroBatch:
    """Some examples of a batch.

    Attributes:
        batch: they.
        examples: ``[b]`` their rows in the whole batch.
        sequences: ``[s]`` their sequences in it.
        tokens: ``[t]`` their scored tokens in it.
        padded_tokens: sequences times the longest.
    """

    batch: Batch
    examples: Tensor
    sequences: Tensor
    tokens: Tensor
    padded_tokens: int


def split(batch: Batch, microbatch_tokens: int) -> list[MicroBatch]:
    """The batch's examples in micro-batches of at most that many padded tokens."""
    if not batch.num_examples:
        return []
    padded = batch.num_sequences * int(batch.lengths.max())
    if padded <= microbatch_tokens:
        counts = (batch.num_examples, batch.num_sequences, batch.num_scored)
        all_examples, all_sequences, all_tokens = map(torch.arange, counts)
        return [MicroBatch(batch, all_examples, all_sequences, all_tokens, padded)]
    widths = torch.zeros(batch.num_examples, dtype=torch.int64)
    widths.scatter_reduce_(0, segment_ids(batch.group_sizes), batch.lengths, "amax")
    order = torch.argsort(widths, descending=True, stable=True)
    plans: list[list[int]] = []
    sequences = width = 0
    for example, own_width, size in zip(
        order.tolist(), widths[order].tolist(), batch.group_sizes[order].tolist(), strict=True
    ):
        if plans and (sequences + size) * width <= microbatch_tokens:
            plans[-1].append(example)
            sequences += size
        else:
            plans.append([example])
            sequences, width = size, own_width
    return [_microbatch(batch, torch.tensor(examples)) for examples in plans]


def _microbatch(batch: Batch, examples: Tensor) -> MicroBatch:
    part = batch.select(examples)
    sequences = entries(batch.group_sizes, examples)
    return MicroBatch(
        batch=part,
        examples=examples,
        sequences=sequences,
        tokens=entries(batch.row_lengths, sequences),
        padded_tokens=part.num_sequences * int(part.lengths.max()) if part.num_sequences else 0,
    )


def entries(lengths: Tensor, segments: Tensor) -> Tensor:
    """Indices of the entries of these segments, segment by segment: ``[S], [s] -> [sum(lengths[segments])]``."""
    chosen = lengths[segments]
    shifts = (lengths.cumsum(0) - lengths)[segments] - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum())) + shifts.repeat_interleave(chosen)
