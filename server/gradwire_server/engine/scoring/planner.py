"""Planning of micro-batches: which examples go through the model together.

Examples are taken longest first, so that neighbours have similar lengths, into micro-batches within a budget of
computed tokens, counted with padding or sharing as the model's form needs. An example (a pair, a group) is never split.
Examples that begin alike follow each other, in the order of their tree of prefixes (:mod:`.prefix_tree`). A tree is cut
where the next micro-batch computes few tokens again, or where memory ends.

A run with lanes has as many micro-batches for each of them, where there are the examples. These are spread so that all
compute about as many tokens; only padded ones and those of a tree stay beside their neighbours. The budget also says
what becomes of the activations of each. The plan depends only on the batch, the budget and that form.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from gradwire_losses.batch import Batch, segment_ids, segment_sum
from torch import Tensor

from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.model.layers.activations import ALL, Activations
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.prefix_tree import MIN_SAVED, distinct_tokens, neighbours

CHEAP_CUT = 16
"""A tree is cut where the next micro-batch computes at most one in so many of its tokens again."""
LARGE_TREE = 16
"""A micro-batch that would cut a tree elsewhere may be up to so many times larger, if it fits."""


@dataclass(frozen=True)
class Budget:
    """Memory limits of one operation.

    Attributes:
        microbatch_tokens: Maximum tokens computed per micro-batch. A larger example goes alone.
        activation_bytes: Maximum bytes of activations kept for a later backward.
        logits_elements: Maximum number of logits in memory at once.
        kept_logits: Maximum number of logits kept for a micro-batch's backward; others are recomputed.
        kept_tokens: Maximum computed tokens of a micro-batch whose activations are kept.
        beyond: How the activations of larger micro-batches are handled.
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

    @property
    def tree_tokens(self) -> int:
        """Maximum computed tokens of a micro-batch that is larger because it does not cut a tree."""
        fitting = 2 * self.microbatch_tokens if self.kept_tokens == ALL else self.kept_tokens or self.whole_tokens
        return max(self.microbatch_tokens, min(fitting, LARGE_TREE * self.microbatch_tokens))

    def activations(self, computed_tokens: int) -> Activations:
        """The handling of the activations of a micro-batch of so many tokens."""
        if computed_tokens <= self.kept_tokens:
            return Activations.KEEP
        return self.beyond if computed_tokens <= self.whole_tokens else self.beyond | Activations.CHUNK


@dataclass(frozen=True)
class MicroBatch:
    """Some examples of a batch.

    Attributes:
        examples: ``[b]`` their rows in the whole batch.
        sequences: ``[s]`` their sequences in the whole batch.
        tokens: ``[t]`` their scored tokens in the whole batch.
        computed_tokens: Number of tokens that go through the trunk, with padding, and what its images count as.
        distinct_tokens: Of these the rows' own: one for all rows that share it.
        activations: How its activations are handled until its backward.
    """

    batch: Batch
    examples: Tensor
    sequences: Tensor
    tokens: Tensor
    computed_tokens: int
    distinct_tokens: int
    activations: Activations = Activations.KEEP


def split(
    batch: Batch,
    microbatch_tokens: int,
    packing: Packing,
    *,
    tree_tokens: int = 0,
    image_cost: float = 0.0,
    lanes: int = 1,
) -> list[MicroBatch]:
    """Split a batch into micro-batches that compute at most that many tokens each, unless one example has more.

    Args:
        tree_tokens, image_cost, lanes: See :class:`Budget`.
    """
    if not batch.num_examples:
        return []
    images, lanes = _Images(batch, image_cost), min(lanes, batch.num_examples)
    flat = batch.num_sequences * int(batch.lengths.max()) if packing is Packing.PADDED else len(batch.input_ids)
    flat += images.cost(images.all)
    examples = _Examples(batch, packing, images)
    if lanes == 1 and flat <= microbatch_tokens:
        return [_whole(batch, examples.size(range(batch.num_examples)))]
    plans = examples.plans(microbatch_tokens, max(microbatch_tokens, tree_tokens), lanes)
    sizes = list(map(examples.size, plans))
    if len(plans) == 1:
        return [_whole(batch, sizes[0])]
    numbers = _in_lanes([each.computed for each in sizes], lanes) if lanes > 1 else range(len(plans))
    return [_microbatch(batch, torch.tensor(plans[number]), sizes[number]) for number in numbers]


class _Tokens(NamedTuple):
    """``computed_tokens`` and ``distinct_tokens`` of a :class:`MicroBatch`."""

    computed: int
    distinct: int


class _Examples:
    """The examples of a batch, and what they cost together.

    Attributes:
        sizes: Sequences of each if they are padded, else its tokens.
        widths: Factor of each size: tokens of the longest sequence, or 1.
    """

    def __init__(self, batch: Batch, packing: Packing, images: _Images) -> None:
        self._batch, self._images = batch, images
        self._padded = packing is Packing.PADDED
        self._shares = packing is Packing.SHARED and batch.num_sequences > 1
        self._keys = batch.input_ids if batch.images is None else batch.images.keys(batch.input_ids)
        groups = segment_ids(batch.group_sizes)
        longest = torch.zeros(batch.num_examples, dtype=torch.int64).scatter_reduce_(0, groups, batch.lengths, "amax")
        self._tokens: list[int] = segment_sum(batch.lengths, batch.group_sizes).tolist()
        self.sizes: list[int] = batch.group_sizes.tolist() if self._padded else list(self._tokens)
        self.widths: list[int] = (longest if self._padded else torch.ones_like(longest)).tolist()
        self._longest_first: list[int] = torch.argsort(longest, descending=True, stable=True).tolist()

    def size(self, examples: Sequence[int]) -> _Tokens:
        """Tokens of some in one micro-batch."""
        shown = frozenset[int]().union(*map(self._images.of_example, examples))
        if self._shares:
            rows = entries(self._batch.group_sizes, torch.tensor(examples)).tolist()
            distinct = tokens = distinct_tokens(self._keys, self._batch.lengths, rows)
        else:
            distinct = sum(self._tokens[example] for example in examples)
            tokens = sum(self.sizes[example] for example in examples) * max(self.widths[each] for each in examples)
        return _Tokens(tokens + self._images.cost(shown), distinct)

    def computed(self, examples: Sequence[int]) -> int:
        """Computed tokens of some in one micro-batch."""
        return self.size(examples).computed

    def plans(self, tokens: int, tree_tokens: int, lanes: int) -> list[list[int]]:
        """Divide all into micro-batches of at most ``tokens``, or ``tree_tokens`` where that does not cut a tree."""
        order, joins = self._in_trees() if self._shares else (self._longest_first, [0] * len(self.sizes))
        neighbours_stay = self._padded or any(joins)
        if lanes > 1 and any(joins):
            tokens = tree_tokens = min(tokens, math.ceil((sum(self.sizes) - sum(joins)) / lanes))
        plans, begin = list[list[int]](), 0
        while begin < len(order):
            end = self._end(order, joins, begin, tokens, tree_tokens)
            while self._shares and end - begin > 1 and self.computed(order[begin:end]) > tree_tokens:
                end -= 1  # nodes that save little are computed more than once
            plans.append(order[begin:end])
            begin = end
        count = min(math.ceil(len(plans) / lanes) * lanes, len(order))
        if neighbours_stay:
            while len(plans) < count:
                most = max((plan for plan in plans if len(plan) > 1), key=self.computed)
                place = plans.index(most)
                plans[place : place + 1] = _halves(most, self.sizes, self.widths)
        elif lanes > 1:
            plans = _spread(self.sizes, self._images, count)
            while any(len(plan) > 1 and self.computed(plan) > tokens for plan in plans):
                count = min(count + lanes, len(order))
                plans = _spread(self.sizes, self._images, count)
        return plans

    def _end(self, order: Sequence[int], joins: Sequence[int], begin: int, tokens: int, tree_tokens: int) -> int:
        """The end of a micro-batch that begins at this place of the order."""
        size, width, shown, cheapest = 0, self.widths[order[begin]], frozenset[int](), 0
        for place in range(begin, len(order)):
            shown |= self._images.of_example(order[place])
            grown = size + self.sizes[order[place]] - (joins[place] if place > begin else 0)
            computed = grown * width + self._images.cost(shown)
            if place > begin:
                if 2 * size >= tokens and (not cheapest or joins[place] <= joins[cheapest]):
                    cheapest = place
                if computed > tokens and joins[place] * CHEAP_CUT <= tokens:
                    return place
                if computed > tree_tokens:
                    return cheapest or place
            size = grown
        return len(order)

    def _in_trees(self) -> tuple[list[int], list[int]]:
        """The examples, those of a tree together, and the tokens that each has in common with the one before it.

        :attr:`sizes` become those of examples that share prefixes within.
        """
        batch = self._batch
        groups: list[int] = segment_ids(batch.group_sizes).tolist()
        rows, common = neighbours(self._keys, batch.lengths, range(batch.num_sequences))
        first, last, trees = dict[int, int](), dict[int, int](), list(range(batch.num_examples))

        def tree_of(example: int) -> int:
            while trees[example] != example:
                trees[example] = example = trees[trees[example]]
            return example

        for place, example in enumerate(groups[row] for row in rows):
            if example in last:
                self.sizes[example] -= min(common[last[example] + 1 : place + 1])
            first.setdefault(example, place)
            last[example] = place
            if common[place] >= MIN_SAVED:
                trees[tree_of(example)] = tree_of(groups[rows[place - 1]])
        turn = dict[int, int]()
        for number, example in enumerate(self._longest_first):
            turn.setdefault(tree_of(example), number)
        order = sorted(first, key=lambda example: (turn[tree_of(example)], first[example]))
        joins = [0]
        for before, after in pairwise(order):
            alike = tree_of(before) == tree_of(after)
            joins.append(min(common[first[before] + 1 : first[after] + 1]) if alike else 0)
        return order, joins


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


def _in_lanes(computed: Sequence[int], lanes: int) -> list[int]:
    """Order micro-batches, the ``i``-th being of lane ``i % lanes``, so that lanes compute about as much."""
    falling = sorted(range(len(computed)), key=lambda number: -computed[number])
    loads, ordered = [0] * lanes, []
    for start in range(0, len(falling), lanes):
        turn = falling[start : start + lanes]
        by_lane = dict(zip(sorted(range(len(turn)), key=loads.__getitem__), turn, strict=True))
        for lane in range(len(turn)):
            loads[lane] += computed[by_lane[lane]]
            ordered.append(by_lane[lane])
    return ordered


def split_for_scores(policy: Policy, batch: Batch, budget: Budget) -> list[MicroBatch]:
    """Split a batch into micro-batches for evaluation mode."""
    return _split(batch, policy.packing(images=batch.images is not None), budget)


def split_for_training(policy: Policy, batch: Batch, budget: Budget) -> list[MicroBatch]:
    """Split a batch into micro-batches for training mode; one example each if the policy has dropout."""
    if policy.has_dropout:
        budget = replace(budget, microbatch_tokens=0)
    micros = _split(batch, policy.packing(training=True, images=batch.images is not None), budget)
    always = Activations.RECOMPUTE if policy.gradient_checkpointing else Activations.KEEP
    chosen = [always | budget.activations(micro.computed_tokens) for micro in micros]
    return [
        micro if micro.activations == each else replace(micro, activations=each)
        for micro, each in zip(micros, chosen, strict=True)
    ]


def _split(batch: Batch, packing: Packing, budget: Budget) -> list[MicroBatch]:
    return split(
        batch, budget.microbatch_tokens, packing, tree_tokens=budget.tree_tokens, image_cost=budget.image_cost,
        lanes=budget.lanes,
    )  # fmt: skip


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


def _whole(batch: Batch, size: _Tokens) -> MicroBatch:
    examples, sequences, tokens = map(torch.arange, (batch.num_examples, batch.num_sequences, batch.num_scored))
    return MicroBatch(batch, examples, sequences, tokens, *size)


def _microbatch(batch: Batch, examples: Tensor, size: _Tokens) -> MicroBatch:
    between_micro_batches()  # cutting a large batch takes seconds too
    sequences = entries(batch.group_sizes, examples)
    tokens = entries(batch.row_lengths, sequences)
    return MicroBatch(batch.select(examples), examples, sequences, tokens, *size)


def entries(lengths: Tensor, segments: Tensor) -> Tensor:
    """Indices of the entries of these segments, segment by segment: ``[S], [s] -> [sum(lengths[segments])]``."""
    chosen = lengths[segments]
    shifts = (lengths.cumsum(0) - lengths)[segments] - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum())) + shifts.repeat_interleave(chosen)
