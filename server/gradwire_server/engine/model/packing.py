"""Ragged sequences side by side on one token axis: nothing padded, and what an example's sequences share only once.

Legend: ``S`` sequences, ``N`` tokens of all of them, ``M`` tokens that are computed. Where the sequences of one example
(the responses to one prompt, a preferred and a rejected answer) begin alike, the first of them holds the common tokens
and each of the others only what follows, its *branch*, which attends to those and to itself. Attention is causal, so
the states are those that each sequence has alone; :mod:`.attention` computes it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from gradwire_losses.batch import segment_ids
from torch import Tensor

MIN_SAVED = 16
"""Tokens that sharing has to save in an example: below that, its own calls of the attention cost more."""

BUCKET_WASTE = 64 * 64
"""Pairs of tokens that a sequence may waste by being padded to another's length: what a call of its own costs."""


class Packing(enum.IntEnum):
    """How a model takes ragged sequences: each form computes less than the one before."""

    PADDED = 0
    PACKED = 1
    SHARED = 2


class Segment(NamedTuple):
    """Neighbouring tokens of one sequence, and where the tokens before them are, if elsewhere: places on the axis."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def reach(self) -> int:
        """How many tokens the last of them may attend to."""
        return self.prefix_length + self.length


class PrefixBlock(NamedTuple):
    """Branches, one behind the other, that attend to all of one prefix."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """Segments that go through one call of causal attention together.

    Attributes:
        rows: how many.
        width: tokens of the longest.
        start: where they lie, one behind the other and equally long; None where they have to be gathered.
        gathered: ``[rows * width]`` places on the axis, a shorter segment's last token repeated.
        real: ``[R]`` the entries of ``gathered`` that are no repetition.
        places: ``[R]`` their places on the axis.
    """

    rows: int
    width: int
    start: int | None
    gathered: Tensor
    real: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies.

    Attributes:
        input_ids: ``[M]``.
        position_ids: ``[M]`` each token's position in its sequence.
        places: ``[N]`` where each token of the sequences is on the axis; several where it is shared.
        own_lengths: ``[S]`` tokens of each sequence that are on the axis as its own, in the order of the sequences.
        segments: those of the sequences that have such tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    own_lengths: Tensor
    segments: tuple[Segment, ...]
    _copies: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(segment.length for segment in self.segments)

    @cached_property
    def reach(self) -> int:
        """Tokens of the longest sequence."""
        return max(segment.reach for segment in self.segments)

    @cached_property
    def prefix_blocks(self) -> list[PrefixBlock]:
        blocks = []
        branches = (segment for segment in self.segments if segment.prefix_length)
        for (start, length), together in groupby(branches, key=lambda each: (each.prefix_start, each.prefix_length)):
            members = list(together)
            stop = members[-1].start + members[-1].length
            blocks.append(PrefixBlock(members[0].start, stop, start, start + length))
        return blocks

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The segments by length; a long one that no other equals is alone."""
        buckets: list[list[Segment]] = []
        for segment in sorted(self.segments, key=lambda each: (-each.length, each.start)):
            if buckets and buckets[-1][0].length ** 2 - segment.length**2 <= BUCKET_WASTE:
                buckets[-1].append(segment)
            else:
                buckets.append([segment])
        return [_bucket(members) for members in buckets]

    @cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """``[segments + 1]`` int32 twice: where each segment's queries, and its keys one behind the other, begin."""
        own = torch.tensor([0, *(segment.length for segment in self.segments)])
        keys = torch.tensor([0, *(segment.reach for segment in self.segments)])
        return own.cumsum(0).int(), keys.cumsum(0).int()

    @cached_property
    def key_places(self) -> Tensor:
        """The keys of each segment one behind the other: places on the axis."""
        parts = []
        for start, length, prefix_start, prefix_length in self.segments:
            parts += [torch.arange(prefix_start, prefix_start + prefix_length), torch.arange(start, start + length)]
        return torch.cat(parts)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """:attr:`offsets`, and :attr:`key_places` where they are not the axis itself, copied there once."""
        if device not in self._copies:
            places = self.key_places if self.prefix_blocks else None
            queries, keys = (each.to(device, non_blocking=True) for each in self.offsets)
            self._copies[device] = queries, keys, None if places is None else places.to(device, non_blocking=True)
        return self._copies[device]


@dataclass(frozen=True, eq=False)
class Padded:
    """Sequences in rows as long as the longest, padded on the right, where causal attention makes it harmless.

    Attributes:
        input_ids: ``[S, W]``.
        places: ``[N]`` where each token is in the flattened rows.
    """

    input_ids: Tensor
    places: Tensor


def arrange(packing: Packing, input_ids: Tensor, lengths: Tensor, group_sizes: Tensor | None = None) -> Layout | Padded:
    """Sequences in the form that a model is to be given them in; arguments as of :func:`lay_out`."""
    if packing is Packing.PADDED:
        return pad(input_ids, lengths)
    return lay_out(input_ids, lengths, group_sizes if packing is Packing.SHARED else None)


def pad(input_ids: Tensor, lengths: Tensor) -> Padded:
    """``[N], [S]`` -> rows of the longest's width."""
    width = int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    sequences = segment_ids(lengths)
    places = torch.arange(len(input_ids)) - starts[sequences] + sequences * width
    padded = torch.zeros(len(lengths) * width, dtype=torch.int64)
    padded[places] = input_ids
    return Padded(padded.view(len(lengths), width), places)


def lay_out(input_ids: Tensor, lengths: Tensor, group_sizes: Tensor | None = None) -> Layout:
    """Sequences on one axis, in their order.

    Args:
        input_ids: ``[N]``.
        lengths: ``[S]``, each at least 1.
        group_sizes: ``[B]`` sequences an example, whose common tokens are to be computed once; None shares nothing.
    """
    starts = lengths.cumsum(0) - lengths
    sequences = segment_ids(lengths)
    offsets = torch.arange(len(input_ids)) - starts[sequences]
    shared = torch.zeros_like(lengths) if group_sizes is None else shared_lengths(input_ids, lengths, group_sizes)
    own_lengths = lengths - shared
    own_starts = own_lengths.cumsum(0) - own_lengths
    if group_sizes is None or not shared.any():
        kept_ids, positions, places = input_ids, offsets, torch.arange(len(input_ids))
        holders = own_starts
    else:
        first = (group_sizes.cumsum(0) - group_sizes)[segment_ids(group_sizes)]
        holders = own_starts[first]
        kept = offsets >= shared[sequences]
        kept_ids, positions = input_ids[kept], offsets[kept]
        places = torch.where(kept, (own_starts - shared)[sequences] + offsets, holders[sequences] + offsets)
    segments = zip(own_starts.tolist(), own_lengths.tolist(), holders.tolist(), shared.tolist(), strict=True)
    return Layout(
        kept_ids,
        positions,
        places,
        own_lengths,
        tuple(
            Segment(start, length, holder if prefix else 0, prefix)
            for start, length, holder, prefix in segments
            if length
        ),
    )


def shared_lengths(input_ids: Tensor, lengths: Tensor, group_sizes: Tensor) -> Tensor:
    """``[S]``: how many first tokens of each sequence need not be computed, since the first of its example has them.

    They are what all sequences of an example begin with; 0 where that saves too little to matter.
    """
    if len(group_sizes) == len(lengths):
        return torch.zeros_like(lengths)
    starts = lengths.cumsum(0) - lengths
    groups = segment_ids(group_sizes)
    first = (group_sizes.cumsum(0) - group_sizes)[groups]
    sequences = segment_ids(lengths)
    offsets = torch.arange(len(input_ids)) - starts[sequences]
    inside = offsets < lengths[first][sequences]
    counterparts = torch.where(inside, starts[first][sequences] + offsets, 0)
    alike = inside & (input_ids[counterparts] == input_ids)
    common = torch.where(alike, lengths[sequences], offsets)
    of_sequence = lengths.scatter_reduce(0, sequences, common, "amin")
    of_group = lengths.new_full(group_sizes.shape, len(input_ids)).scatter_reduce(0, groups, of_sequence, "amin")
    of_group *= of_group * (group_sizes - 1) >= MIN_SAVED
    return torch.where(torch.arange(len(lengths)) == first, 0, of_group[groups])


def _bucket(segments: Sequence[Segment]) -> Bucket:
    width = segments[0].length
    starts = torch.tensor([segment.start for segment in segments])
    lengths = torch.tensor([segment.length for segment in segments])
    side_by_side = all(
        after.start == before.start + width and after.length == width for before, after in pairwise(segments)
    )
    columns = torch.arange(width)
    gathered = (starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)).flatten()
    real = (columns < lengths[:, None]).flatten().nonzero().squeeze(1)
    return Bucket(len(segments), width, segments[0].start if side_by_side else None, gathered, real, gathered[real])
