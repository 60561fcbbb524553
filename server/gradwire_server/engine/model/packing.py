"""Packing of ragged sequences on one token axis, without padding and with shared prefixes computed once.

Legend: ``S`` sequences, ``N`` tokens of all of them, ``M`` tokens that are computed. Sequences that begin alike form a
tree (:mod:`.prefix_tree`), of any depth: the first sequence through a node holds its tokens, and each later one holds
only the tokens beyond the nodes that are held already, its *branch*, which attends to these nodes and to itself.
Attention is causal, so each sequence has the hidden states it would have alone; :mod:`.attention` computes it.
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
from gradwire_server.engine.model.prefix_tree import Branch, branches

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
    """Consecutive tokens of one sequence, and the places of the tokens before them if those are held elsewhere.

    Attributes:
        spans: First and last place of each node that holds tokens before the segment's, in their order; a last place is
            the one after.
    """

    start: int
    length: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def reach(self) -> int:
        """Number of tokens that the segment's last token attends to."""
        return self.length + sum(stop - start for start, stop in self.spans)

    @property
    def key_places(self) -> Tensor:
        """Their places."""
        own = torch.arange(self.start, self.start + self.length)
        return torch.cat([*(torch.arange(*span) for span in self.spans), own]) if self.spans else own


class PrefixBlock(NamedTuple):
    """Consecutive tokens that all attend to one whole node."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int


class QueryBlocks(NamedTuple):
    """The blocks of queries that a CPU's kernel of attention computes one by one.

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
    """Blocks for a CPU's kernel of attention in which each query takes its keys in their order.

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
        segments: Segments of the sequences that hold any token, in the order of the axis.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
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
        """For each node the tokens that attend to it from elsewhere, which lie together."""
        blocks: list[PrefixBlock] = []
        latest: dict[tuple[int, int], int] = {}
        for segment in self.segments:
            stop = segment.start + segment.length
            for span in segment.spans:
                number = latest.get(span)
                if number is not None and blocks[number].stop == segment.start:
                    blocks[number] = blocks[number]._replace(stop=stop)
                else:
                    latest[span] = len(blocks)
                    blocks.append(PrefixBlock(segment.start, stop, *span))
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
        blocks, parts, families = list[list[int]](), list[tuple[int, int, int, int]](), dict[int, int]()
        family = self.segments[0].start

        def of_one(segment: Segment) -> tuple[int, tuple[int, int] | None]:
            nonlocal family
            if not segment.spans and segment.start - family >= BLOCK:
                family = segment.start
            return family, segment.spans[0] if segment.spans else None

        for (family_start, _), together in groupby(self.segments, key=of_one):
            members = list(together)
            first, stop = members[0].start, members[-1].start + members[-1].length
            families.setdefault(family_start, len(blocks))
            number = 0
            for place in range(first, stop, BLOCK):
                end, begin = min(place + BLOCK, stop), len(parts)
                while members[number].start + members[number].length <= place:
                    number += 1
                parts += _parts(members, number, place, end)
                blocks.append([place, end, begin, len(parts)])
        return QueryBlocks(*(torch.tensor(each) for each in (blocks, parts, [*families.values(), len(blocks)])))

    @cached_property
    def masked(self) -> MaskedSegments:
        """The segments for attention with masks."""
        return MaskedSegments([QuerySegment(each.start, each.length, each.key_places) for each in self.segments])

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
        return torch.cat([segment.key_places for segment in self.segments])

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


def arrange(
    packing: Packing, input_ids: Tensor, lengths: Tensor, sharing: Tensor | None = None, keys: Tensor | None = None
) -> Layout | Padded:
    """Arrange sequences in the form that a model takes; arguments as in :func:`lay_out`."""
    if packing is Packing.PADDED:
        return pad(input_ids, lengths)
    return lay_out(input_ids, lengths, sharing if packing is Packing.SHARED else None, keys)


def pad(input_ids: Tensor, lengths: Tensor) -> Padded:
    """Pad ``[N]`` tokens of sequences of ``[S]`` lengths to rows as wide as the longest."""
    width = int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    sequences = segment_ids(lengths)
    places = torch.arange(len(input_ids)) - starts[sequences] + sequences * width
    padded = torch.zeros(len(lengths) * width, dtype=torch.int64)
    padded[places] = input_ids
    return Padded(padded.view(len(lengths), width), places)


def lay_out(input_ids: Tensor, lengths: Tensor, sharing: Tensor | None = None, keys: Tensor | None = None) -> Layout:
    """Lay out sequences on one axis.

    Args:
        input_ids: ``[N]``.
        lengths: ``[S]``, each at least 1.
        sharing: ``[G]`` numbers of consecutive sequences that share prefixes with each other only; None shares nothing.
        keys: ``[N]`` numbers that are equal where tokens are, images included; the ids by default.

    Returns:
        Sequences in their order, or, where any share, in the order of their trees.
    """
    starts = lengths.cumsum(0) - lengths
    found: list[Branch] = []
    if sharing is not None and len(sharing) < len(lengths):
        sequence = 0
        for count in sharing.tolist():
            found += branches(input_ids if keys is None else keys, lengths, range(sequence, sequence + count))
            sequence += count
    if all(branch.own == branch.length for branch in found):
        offsets = torch.arange(len(input_ids)) - starts.repeat_interleave(lengths)
        segments = tuple(map(Segment, starts.tolist(), lengths.tolist()))
        return Layout(input_ids, offsets, torch.arange(len(input_ids)), segments)
    begins: list[int] = starts.tolist()
    places, segments_of = torch.empty_like(input_ids), dict[int, Segment]()
    kept, positions, place = list[Tensor](), list[Tensor](), 0
    for sequence, length, own, nodes, holder in found:
        begin = begins[sequence]
        if holder is not None:
            places[begin : begin + length] = places[begins[holder] : begins[holder] + length]
            continue
        spans = tuple((segments_of[each].start + start, segments_of[each].start + stop) for each, start, stop in nodes)
        segments_of[sequence] = segment = Segment(place, own, spans)
        places[begin : begin + length] = segment.key_places
        kept.append(input_ids[begin + length - own : begin + length])
        positions.append(torch.arange(length - own, length))
        place += own
    return Layout(torch.cat(kept), torch.cat(positions), places, tuple(segments_of.values()))


def tree_layout() -> Layout:
    """A small layout with nodes within nodes, to try kernels with."""
    node = [1] * 40 + [2] * 30
    rows = [[1] * 90, node + [2] * 30, node + [3] * 5, node + [4] * 70, [1] * 40 + [5], [6] * 5, [7] * 33]
    lengths = torch.tensor([len(row) for row in rows])
    return lay_out(torch.tensor([token for row in rows for token in row]), lengths, torch.tensor([len(rows)]))


def _parts(members: Sequence[Segment], number: int, place: int, end: int) -> list[tuple[int, int, int, int]]:
    """Parts of a block of queries: each node that any of them attend to, for all of these, and their own segments.

    Args:
        members: Segments, the one numbered ``number`` being that of the first query.
    """
    shared: dict[tuple[int, int], list[int]] = {}
    own = []
    while number < len(members) and members[number].start < end:
        segment = members[number]
        first, stop = max(place, segment.start), min(end, segment.start + segment.length)
        for span in segment.spans:
            shared.setdefault(span, [first, stop])[1] = stop
        own.append((first, stop, segment.start, stop))
        number += 1
    parts: list[tuple[int, int, int, int]] = []
    for (start, stop), queries in shared.items():
        if parts and parts[-1][3] == start and [*parts[-1][:2]] == queries:
            parts[-1] = (*parts[-1][:3], stop)
        else:
            parts.append((queries[0], queries[1], start, stop))
    return parts + own


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
