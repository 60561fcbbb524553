"""Packing of ragged sequences on one token axis, without padding and with shared prefixes computed once.

Legend: ``S`` sequences, ``N`` tokens of all of them, ``M`` tokens that are computed. If the sequences of one example
(the responses to one prompt, a preferred and a rejected answer) begin alike, the first sequence holds the common tokens
and each other one only its remaining tokens, its *branch*, which attends to the common tokens and itself. Attention is
causal, so each sequence has the hidden states it would have alone; :mod:`.attention` computes it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from gradwire_losses.batch import segment_ids, sent
from torch import Tensor

from gradwire_server.engine.model.attention.masked import MaskedSegments, QuerySegment

MIN_SAVED = 16
"""Minimum number of tokens that sharing must save in an example; below it the extra attention calls cost more."""

BLOCK = 64
"""Queries of a block, as in ``layers/cpu/blocks.c``."""

BUCKET_WASTE = 64 * 64
"""Token pairs that padding a sequence to another's length may waste: about the cost of a separate call."""


class Packing(enum.IntEnum):
    """How a model takes ragged sequences; each form computes fewer tokens than the one before."""

    PADDED = 0
    PACKED = 1
    SHARED = 2


class Segment(NamedTuple):
    """Consecutive tokens of one sequence, and the place of the tokens before them if those are held elsewhere."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def reach(self) -> int:
        """Number of tokens that the segment's last token attends to."""
        return self.prefix_length + self.length


class PrefixBlock(NamedTuple):
    """Consecutive branches that all attend to one whole prefix."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int


class QueryBlocks(NamedTuple):
    """What a CPU's kernel of attention computes at a time.

    Attributes:
        blocks: ``[B, 4]`` first and last place of up to :data:`BLOCK` queries, and first and last of their parts.
        parts: ``[P, 4]`` first and last place of queries, and of the keys to which they attend, each up to its own.
        families: ``[F + 1]`` first blocks of segments whose keys are those of no other family; the number of blocks.

    A last place is the one after.
    """

    blocks: Tensor
    parts: Tensor
    families: Tensor


class OrderedKeys(NamedTuple):
    """What a CPU's kernel of attention computes at a time where each query takes its keys in their order.

    Attributes:
        places: ``[N]`` of the keys of all blocks.
        blocks: ``[B, 4]`` first and last place of up to :data:`BLOCK` queries, and first and last of the ``places`` to
            which the last query attends; each one before it attends to one less.
    """

    places: Tensor
    blocks: Tensor


def ordered_keys(segments: Sequence[QuerySegment]) -> OrderedKeys:
    """Cut segments into blocks."""
    blocks, first = [], 0
    for each in segments:
        before = first + len(each.keys) - each.length
        for start in range(0, each.length, BLOCK):
            stop = min(start + BLOCK, each.length)
            blocks.append((each.start + start, each.start + stop, first, before + stop))
        first += len(each.keys)
    return OrderedKeys(torch.cat([each.keys for each in segments]), torch.tensor(blocks))


@dataclass(frozen=True, eq=False)
class Bucket:
    """Segments computed by one call of causal attention.

    Attributes:
        rows: Number of segments.
        width: Tokens of the longest segment.
        start: First place, if the segments are contiguous and of equal length; None if they must be gathered.
        gathered: ``[rows * width]`` places on the axis; a shorter segment repeats its last token.
        real: ``[R]`` indices into ``gathered`` that are not repetitions.
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
    """Positions of sequences on the token axis.

    Attributes:
        input_ids: ``[M]`` token ids.
        position_ids: ``[M]`` position of each token in its sequence.
        places: ``[N]`` place on the axis of each token of the sequences; shared tokens have the same place.
        own_lengths: ``[S]`` number of tokens that each sequence holds itself.
        segments: Segments of the sequences that hold any token, in the order of the sequences.
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
        """The segments grouped by length; a long segment that no other matches is alone."""
        buckets: list[list[Segment]] = []
        for segment in sorted(self.segments, key=lambda each: (-each.length, each.start)):
            if buckets and buckets[-1][0].length ** 2 - segment.length**2 <= BUCKET_WASTE:
                buckets[-1].append(segment)
            else:
                buckets.append([segment])
        return [bucket_of(members) for members in buckets]

    @cached_property
    def whole(self) -> Bucket | None:
        """The bucket of a layout that is one: sequences of one length without prefixes; None for any other."""
        one = len(self.buckets) == 1 and self.buckets[0].start == 0 and not self.prefix_blocks
        return self.buckets[0] if one else None

    @cached_property
    def query_blocks(self) -> QueryBlocks:
        blocks, parts, families = list[list[int]](), list[tuple[int, ...]](), dict[int, int]()
        family = self.segments[0].start

        def of_one(segment: Segment) -> tuple[int, int, int]:
            nonlocal family
            if not segment.prefix_length and segment.start - family >= BLOCK:
                family = segment.start
            return family, segment.prefix_start, segment.prefix_length

        for (family_start, prefix_start, prefix_length), together in groupby(self.segments, key=of_one):
            members = list(together)
            first, stop = members[0].start, members[-1].start + members[-1].length
            families.setdefault(family_start, len(blocks))
            for start, length, *_ in members:
                place = start
                while place < start + length:
                    into = (place - first) % BLOCK
                    if into == 0:
                        blocks.append([place, min(place + BLOCK, stop), len(parts), 0])
                        if prefix_length:
                            parts.append((*blocks[-1][:2], prefix_start, prefix_start + prefix_length))
                    end = min(place + BLOCK - into, start + length)
                    parts.append((place, end, start, end))
                    place, blocks[-1][3] = end, len(parts)
        return QueryBlocks(*(torch.tensor(each) for each in (blocks, parts, [*families.values(), len(blocks)])))

    @cached_property
    def masked(self) -> MaskedSegments:
        """The segments for attention with masks."""
        segments = []
        for start, length, prefix_start, prefix_length in self.segments:
            own = torch.arange(start, start + length)
            prefix = torch.arange(prefix_start, prefix_start + prefix_length)
            segments.append(QuerySegment(start, length, torch.cat([prefix, own])))
        return MaskedSegments(segments)

    @cached_property
    def ordered(self) -> OrderedKeys:
        """Blocks for the kernel that takes each query's keys in their order."""
        return ordered_keys(self.masked.segments)

    @cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """``[segments + 1]`` int32, twice: offsets of each segment's queries, and of its concatenated keys."""
        own = torch.tensor([0, *(segment.length for segment in self.segments)])
        keys = torch.tensor([0, *(segment.reach for segment in self.segments)])
        return own.cumsum(0).int(), keys.cumsum(0).int()

    @cached_property
    def key_places(self) -> Tensor:
        """Places on the axis of all segments' keys, concatenated."""
        parts = []
        for start, length, prefix_start, prefix_length in self.segments:
            parts += [torch.arange(prefix_start, prefix_start + prefix_length), torch.arange(start, start + length)]
        return torch.cat(parts)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """:attr:`offsets`, and :attr:`key_places` unless they equal the axis, copied once to the device."""
        if device not in self._copies:
            places = self.key_places if self.prefix_blocks else None
            queries, keys = (sent(each, device) for each in self.offsets)
            self._copies[device] = queries, keys, None if places is None else sent(places, device)
        return self._copies[device]


@dataclass(frozen=True, eq=False)
class Padded:
    """Sequences as rows padded on the right to the longest, where causal attention makes padding harmless.

    Attributes:
        input_ids: ``[S, W]`` token ids.
        places: ``[N]`` place of each token in the flattened rows.
    """

    input_ids: Tensor
    places: Tensor


def arrange(packing: Packing, input_ids: Tensor, lengths: Tensor, group_sizes: Tensor | None = None) -> Layout | Padded:
    """Arrange sequences in the form that a model takes; arguments as in :func:`lay_out`."""
    if packing is Packing.PADDED:
        return pad(input_ids, lengths)
    return lay_out(input_ids, lengths, group_sizes if packing is Packing.SHARED else None)


def pad(input_ids: Tensor, lengths: Tensor) -> Padded:
    """Pad ``[N]`` tokens of sequences of ``[S]`` lengths to rows as wide as the longest."""
    width = int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    sequences = segment_ids(lengths)
    places = torch.arange(len(input_ids)) - starts[sequences] + sequences * width
    padded = torch.zeros(len(lengths) * width, dtype=torch.int64)
    padded[places] = input_ids
    return Padded(padded.view(len(lengths), width), places)


def lay_out(input_ids: Tensor, lengths: Tensor, group_sizes: Tensor | None = None) -> Layout:
    """Lay out sequences on one axis, in their order.

    Args:
        input_ids: ``[N]``.
        lengths: ``[S]``, each at least 1.
        group_sizes: ``[B]`` sequences per example; common prefixes are computed once. None shares nothing.
    """
    if len(lengths) == 1:
        every = torch.arange(len(input_ids))
        return Layout(input_ids, every, every, lengths, (Segment(0, len(input_ids)),))
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
    """``[S]``: number of leading tokens of each sequence that its example's first sequence computes for it.

    They are the common prefix of all sequences of the example; 0 where sharing saves fewer than :data:`MIN_SAVED`.
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


def bucket_of(segments: Sequence[Segment]) -> Bucket:
    """Put segments, the longest first, into one bucket."""
    start, width = segments[0].start, segments[0].length
    if all(after.start == before.start + width and after.length == width for before, after in pairwise(segments)):
        real = torch.arange(len(segments) * width)
        places = real + start if start else real
        return Bucket(len(segments), width, start, places, real, places)
    starts = torch.tensor([segment.start for segment in segments])
    lengths = torch.tensor([segment.length for segment in segments])
    columns = torch.arange(width)
    gathered = (starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)).flatten()
    real = (columns < lengths[:, None]).flatten().nonzero().squeeze(1)
    return Bucket(len(segments), width, None, gathered, real, gathered[real])
