"""Planning of micro-batches: which examples go through the model together.

Examples are taken longest first, so that neighbours have similar lengths, into micro-batches within a budget of
computed tokens, counted with padding or sharing as the model's form needs. An example (a pair, a group) is never split.
The budget also says what becomes of the activations of each. The plan depends only on the batch, the budget and that
form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gradwire_losses.batch import Batch, segment_ids, segment_sum
from torch import Tensor

from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.model.activations import ALL, Activations
from gradwire_server.engine.model.packing import Packing, shared_lengths


@dataclass(frozen=True)
class Budget:
    """Memory limits of one operation.

    Attributes:
        microbatch_tokens: Maximum tokens computed per micro-batch. A larger example goes alone.
        activation_bytes: Maximum bytes of activations kept for a later backward.
        logits_elements: Maximum number of logits in memory at once.
        kept_logits: Maximum number of logits kept for a micro-batch's backward; others are recomputed.
        kept_tokens: Maximum computed tokens of a micro-batch whose activations are kept.
        beyond: What becomes of the activations of larger micro-batches.
        whole_tokens: Maximum computed tokens of those whose feed-forward layers compute all tokens at once.
    """

    microbatch_tokens: int = 2048
    activation_bytes: int = 2 << 30
    logits_elements: int = 1 << 22
    kept_logits: int = 1 << 25
    kept_tokens: int = ALL
    beyond: Activations = Activations.RECOMPUTE
    whole_tokens: int = ALL

    def activations(self, computed_tokens: int) -> Activations:
        """What becomes of the activations of a micro-batch of so many tokens."""
        if computed_tokens <= self.kept_tokens:
            return Activations.KEEP
        return self.beyond if computed_tokens <= self.whole_tokens else self.beyond | Activations.CHUNK


@dataclass(frozen=True)
class MicroBatch:
    """Some examples of a batch.

    Attributes:
        batch: The examples as a batch.
        examples: ``[b]`` their rows in the whole batch.
        sequences: ``[s]`` their sequences in the whole batch.
        tokens: ``[t]`` their scored tokens in the whole batch.
        computed_tokens: Number of tokens that go through the trunk.
        activations: What becomes of its activations until its backward.
    """

    batch: Batch
    examples: Tensor
    sequences: Tensor
    tokens: Tensor
    computed_tokens: int
    activations: Activations = Activations.KEEP


def split(batch: Batch, microbatch_tokens: int, packing: Packing) -> list[MicroBatch]:
    """Split a batch into micro-batches that compute at most that many tokens each, unless one example has more."""
    if not batch.num_examples:
        return []
    if packing is not Packing.SHARED or batch.num_sequences == batch.num_examples:
        padded = batch.num_sequences * int(batch.lengths.max())
        together = padded if packing is Packing.PADDED else len(batch.input_ids)
        if together <= microbatch_tokens:
            return [_whole(batch, together)]
    groups = segment_ids(batch.group_sizes)
    widths = torch.zeros(batch.num_examples, dtype=torch.int64).scatter_reduce_(0, groups, batch.lengths, "amax")
    order = torch.argsort(widths, descending=True, stable=True)
    if packing is Packing.PADDED:
        sizes = batch.group_sizes
    else:
        own = batch.lengths
        if packing is Packing.SHARED:
            own = own - shared_lengths(batch.input_ids, batch.lengths, batch.group_sizes)
        sizes = segment_sum(own, batch.group_sizes)
        widths = torch.ones_like(widths)
    plans: list[list[int]] = []
    computed: list[int] = []
    size = width = 0
    for example, own_width, own_size in zip(order.tolist(), widths[order].tolist(), sizes[order].tolist(), strict=True):
        if plans and (size + own_size) * width <= microbatch_tokens:
            plans[-1].append(example)
            size += own_size
            computed[-1] = size * width
        else:
            plans.append([example])
            size, width = own_size, own_width
            computed.append(size * width)
    if len(plans) == 1:
        return [_whole(batch, computed[0])]
    return [
        _microbatch(batch, torch.tensor(examples), tokens) for examples, tokens in zip(plans, computed, strict=True)
    ]


def _whole(batch: Batch, computed_tokens: int) -> MicroBatch:
    examples, sequences, tokens = map(torch.arange, (batch.num_examples, batch.num_sequences, batch.num_scored))
    return MicroBatch(batch, examples, sequences, tokens, computed_tokens)


def _microbatch(batch: Batch, examples: Tensor, computed_tokens: int) -> MicroBatch:
    between_micro_batches()  # cutting a large batch takes seconds too
    sequences = entries(batch.group_sizes, examples)
    tokens = entries(batch.row_lengths, sequences)
    return MicroBatch(batch.select(examples), examples, sequences, tokens, computed_tokens)


def entries(lengths: Tensor, segments: Tensor) -> Tensor:
    """Indices of the entries of these segments, segment by segment: ``[S], [s] -> [sum(lengths[segments])]``."""
    chosen = lengths[segments]
    shifts = (lengths.cumsum(0) - lengths)[segments] - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum())) + shifts.repeat_interleave(chosen)
