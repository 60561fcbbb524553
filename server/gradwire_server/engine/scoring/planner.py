"""Planning of micro-batches: which examples go through the model together.

Examples are taken longest first, so that neighbours have similar lengths, into micro-batches within a budget of
computed tokens, counted with padding or sharing as the model's form needs. An example (a pair, a group) is never split.
A run with lanes has as many micro-batches for each of them, where there are the examples. These are spread so that all
compute about as many tokens; only padded ones stay beside their neighbours. The budget also says what becomes of the
activations of each. The plan depends only on the batch, the budget and that form.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from gradwire_losses.batch import Batch, segment_ids, segment_sum
from torch import Tensor

from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.model.layers.activations import ALL, Activations
from gradwire_server.engine.model.packing import Packing, shared_lengths
from gradwire_server.engine.model.policy import Policy


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
        image_cost: Computed tokens that one image token counts as in these limits, beside itself: what the vision part
            of the model takes for it. An image counts once in a micro-batch, however many rows show it.
        lanes: Lanes of the run; the number of micro-batches is a multiple of it, where there are as many examples.
    """

    microbatch_tokens: int = 2048
    activation_bytes: int = 2 << 30
    logits_elements: int = 1 << 22
    kept_logits: int = 1 << 25
    kept_tokens: int = ALL
    beyond: Activations = Activations.RECOMPUTE
    whole_tokens: int = ALL
    image_cost: float = 0.0
    lanes: int = 1

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
        computed_tokens: Number of tokens that go through the trunk, and what its images count as.
        activations: What becomes of its activations until its backward.
    """

    batch: Batch
    examples: Tensor
    sequences: Tensor
    tokens: Tensor
    computed_tokens: int
    activations: Activations = Activations.KEEP


def split(
    batch: Batch, microbatch_tokens: int, packing: Packing, *, image_cost: float = 0.0, lanes: int = 1
) -> list[MicroBatch]:
    """Split a batch into micro-batches that compute at most that many tokens each, unless one example has more.

    Args:
        image_cost, lanes: As of :class:`Budget`.
    """
    if not batch.num_examples:
        return []
    images = _Images(batch, image_cost)
    if packing is not Packing.SHARED or batch.num_sequences == batch.num_examples:
        padded = packing is Packing.PADDED
        together = batch.num_sequences * int(batch.lengths.max()) if padded else batch.input_ids.shape[0]
        together += images.cost(images.all)
        if together <= microbatch_tokens and min(lanes, batch.num_examples) == 1:
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
    own_widths: list[int] = widths.tolist()
    own_sizes: list[int] = sizes.tolist()

    def computed(examples: Sequence[int]) -> int:
        shown = frozenset[int]().union(*map(images.of_example, examples))
        width = max(own_widths[example] for example in examples)
        return sum(own_sizes[example] for example in examples) * width + images.cost(shown)

    plans: list[list[int]] = []
    size = width = 0
    shown: frozenset[int] = frozenset()
    for example in order.tolist():
        with_own = shown | images.of_example(example)
        if plans and (size + own_sizes[example]) * width + images.cost(with_own) <= microbatch_tokens:
            plans[-1].append(example)
            size, shown = size + own_sizes[example], with_own
        else:
            plans.append([example])
            size, width, shown = own_sizes[example], own_widths[example], images.of_example(example)
    if lanes > 1:
        count = min(math.ceil(len(plans) / lanes) * lanes, batch.num_examples)
        if packing is Packing.PADDED:  # neighbours stay together
            while len(plans) < count:
                most = max((plan for plan in plans if len(plan) > 1), key=computed)
                place = plans.index(most)
                plans[place : place + 1] = _halves(most, own_sizes, own_widths)
        else:
            plans = _spread(own_sizes, images, count)
            while any(len(plan) > 1 and computed(plan) > microbatch_tokens for plan in plans):
                count = min(count + lanes, batch.num_examples)
                plans = _spread(own_sizes, images, count)
        plans = _in_lanes(plans, [computed(plan) for plan in plans], lanes)
    if len(plans) == 1:
        return [_whole(batch, computed(plans[0]))]
    return [_microbatch(batch, torch.tensor(examples), computed(examples)) for examples in plans]


def _halves(examples: list[int], sizes: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
    """Cut examples, the widest first, in two, so that the half with more computed tokens has as few as possible."""
    ends = list(accumulate(sizes[example] for example in examples))

    def larger(count: int) -> int:
        rest = (ends[-1] - ends[count - 1]) * widths[examples[count]]
        return max(ends[count - 1] * widths[examples[0]], rest)

    cut = min(range(1, len(examples)), key=larger)
    return [examples[:cut], examples[cut:]]


def _spread(sizes: Sequence[int], images: _Images, count: int) -> list[list[int]]:
    """Spread examples over so many micro-batches, the largest first, each to the one that computes the least so far."""
    plans: list[list[int]] = [[] for _ in range(count)]
    shown = [frozenset[int]()] * count
    tokens = [0] * count
    least = [(0, number) for number in range(count)]
    for example in sorted(range(len(sizes)), key=lambda example: -sizes[example]):
        _, number = heapq.heappop(least)
        plans[number].append(example)
        tokens[number] += sizes[example]
        shown[number] |= images.of_example(example)
        heapq.heappush(least, (tokens[number] + images.cost(shown[number]), number))
    return plans


def _in_lanes(plans: Sequence[list[int]], computed: Sequence[int], lanes: int) -> list[list[int]]:
    """Order micro-batches, the one numbered ``i`` being of lane ``i % lanes``, so that lanes compute about as much."""
    falling = sorted(range(len(plans)), key=lambda number: -computed[number])
    loads, ordered = [0] * lanes, []
    for start in range(0, len(falling), lanes):
        turn = falling[start : start + lanes]
        by_lane = dict(zip(sorted(range(len(turn)), key=loads.__getitem__), turn, strict=True))
        for lane in range(len(turn)):
            loads[lane] += computed[by_lane[lane]]
            ordered.append(plans[by_lane[lane]])
    return ordered


def split_for_scores(policy: Policy, batch: Batch, budget: Budget) -> list[MicroBatch]:
    """Split a batch into micro-batches for evaluation mode."""
    packing = policy.packing(images=batch.images is not None)
    return split(batch, budget.microbatch_tokens, packing, image_cost=budget.image_cost, lanes=budget.lanes)


def split_for_training(policy: Policy, batch: Batch, budget: Budget) -> list[MicroBatch]:
    """Split a batch into micro-batches for training mode; one example each if the policy has dropout."""
    most = 0 if policy.has_dropout else budget.microbatch_tokens
    packing = policy.packing(training=True, images=batch.images is not None)
    micros = split(batch, most, packing, image_cost=budget.image_cost, lanes=budget.lanes)
    always = Activations.RECOMPUTE if policy.gradient_checkpointing else Activations.KEEP
    chosen = [always | budget.activations(micro.computed_tokens) for micro in micros]
    return [
        micro if micro.activations == each else replace(micro, activations=each)
        for micro, each in zip(micros, chosen, strict=True)
    ]


class _Images:
    """The images of a batch's examples, and the tokens that they count as in a micro-batch.

    Attributes:
        all: Numbers of all that its rows show; none if images cost nothing.
    """

    def __init__(self, batch: Batch, cost: float) -> None:
        self._cost, self._shown = cost, dict[int, set[int]]()
        self._counts: list[int] = []
        if batch.images is not None and cost:
            places = batch.images.places
            tokens = (places >= 0).nonzero().squeeze(1)
            examples = segment_ids(batch.group_sizes)[segment_ids(batch.lengths)[tokens]]
            numbers = torch.searchsorted(batch.images.ends, places[tokens], right=True)
            for example, number in torch.stack([examples, numbers]).unique(dim=1).T.tolist():
                self._shown.setdefault(example, set()).add(number)
            self._counts = [picture.count for picture in batch.images.pictures]
        self.all = frozenset(chain.from_iterable(self._shown.values()))

    def of_example(self, example: int) -> frozenset[int]:
        """Numbers of the images that an example shows."""
        return frozenset(self._shown.get(example, ()))

    def cost(self, numbers: frozenset[int]) -> int:
        """Computed tokens that these images count as."""
        return math.ceil(self._cost * sum(self._counts[number] for number in numbers))


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
