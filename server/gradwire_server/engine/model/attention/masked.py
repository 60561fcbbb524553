"""Attention of segments with any keys, by masked calls of SDPA on classes of segments of similar lengths.

Used where no kernel takes sequences of different lengths. The number of calls depends on how far the lengths spread,
not on the number of segments. The queries of a segment with many pairs of a query and a key are cut into pieces, which
are computed once more in the backward pass, so that no mask or copy of keys of the square of a length exists.

Legend: ``M`` query tokens, ``T`` key tokens, ``H`` heads, ``K`` heads of keys and
values, ``D`` head size; in a class ``S`` segments, ``W`` queries and ``R`` keys of its longest segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from gradwire_losses.batch import sent
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES_PER_DOUBLING = 2
"""Lengths in one class differ by a factor of less than the square root of two."""
MOST_PAIRS = 1 << 25
"""Maximum pairs of a query and a key in one call, unless one segment has more."""
LONG_PAIRS = 1 << 28
"""Segments with more pairs, from 16,384 tokens on, are cut."""


@dataclass(frozen=True, eq=False)
class QuerySegment:
    """Consecutive queries, the last of the ``[R]`` tokens at ``keys``, that attend to those up to themselves."""

    start: int
    length: int
    keys: Tensor


@dataclass(frozen=True, eq=False)
class _Class:
    """Segments of one call; a shorter one repeats its last query and its last key.

    Attributes:
        shape: ``S``, ``W`` and ``R``.
        queries: ``[S * W]`` places of queries.
        keys: ``[S * R]`` places of keys.
        at: ``[S, W]`` index of each query among its segment's keys.
        whole: Whether queries and keys of every segment are the same tokens.
    """

    shape: tuple[int, int, int]
    queries: Tensor
    keys: Tensor
    at: Tensor
    whole: bool

    def to(self, device: torch.device) -> _Class:
        queries, keys, at = (sent(each, device) for each in (self.queries, self.keys, self.at))
        return _Class(self.shape, queries, keys, at, self.whole)


@dataclass(frozen=True, eq=False)
class MaskedSegments:
    """Segments as :func:`masked_attention` takes them.

    Attributes:
        pieces: Whether long segments were cut, so that masks and copies of keys are not to be kept.
    """

    segments: Sequence[QuerySegment]
    pieces: bool = False
    _bounded: dict[int | None, MaskedSegments] = field(default_factory=dict)
    _sent: dict[torch.device, tuple[list[_Class], Tensor]] = field(default_factory=dict)
    _masks: dict[tuple[torch.device, int, int | None], Tensor] = field(default_factory=dict)

    def bounded(self, window: int | None) -> MaskedSegments:
        """The same segments, those with more than :data:`LONG_PAIRS` pairs in pieces; itself if there are none."""
        if all(each.length * len(each.keys) <= LONG_PAIRS for each in self.segments):
            return self
        if window not in self._bounded:
            pieces = [piece for segment in self.segments for piece in _pieces(segment, window)]
            self._bounded[window] = MaskedSegments(pieces, pieces=True)
        return self._bounded[window]

    @cached_property
    def _classes(self) -> tuple[list[_Class], Tensor]:
        """The classes, and the place of each query among the queries of all classes."""
        members: dict[tuple[int, int], list[QuerySegment]] = {}
        for segment in self.segments:
            members.setdefault((_size_class(segment.length), _size_class(len(segment.keys))), []).append(segment)
        classes, places, total = [], [], 0
        for of_class in members.values():
            width, reach = max(each.length for each in of_class), max(len(each.keys) for each in of_class)
            rows = max(1, MOST_PAIRS // (width * reach))
            for first in range(0, len(of_class), rows):
                part = of_class[first : first + rows]
                classes.append(_class(part))
                width = classes[-1].shape[1]
                for row, segment in enumerate(part):
                    begin = total + row * width
                    places.append((segment.start, torch.arange(begin, begin + segment.length)))
                total += len(part) * width
        places.sort(key=lambda each: each[0])
        return classes, torch.cat([place for _, place in places])

    def on(self, device: torch.device) -> tuple[list[_Class], Tensor]:
        """The classes and places on a device, copied once."""
        if device not in self._sent:
            classes, places = self._classes
            self._sent[device] = [each.to(device) for each in classes], sent(places, device)
        return self._sent[device]

    def mask(self, device: torch.device, number: int, window: int | None) -> Tensor | None:
        """``[S, 1, W, R]`` which keys the queries of a class attend to; None if all up to themselves."""
        of_class = self.on(device)[0][number]
        _, _, reach = of_class.shape
        if of_class.whole and (window is None or window >= reach):
            return None
        key = device, number, window
        if key in self._masks:
            return self._masks[key]
        keys, at = torch.arange(reach, device=device), of_class.at[:, None, :, None]
        mask = keys <= at
        mask = mask if window is None else mask & (keys > at - window)
        if not self.pieces:
            self._masks[key] = mask
        return mask


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: MaskedSegments,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Differentiable attention: ``[M, H, D], [T, K, D], [T, K, D] -> [M, H, D]``; all queries belong to segments."""
    segments = segments.bounded(window)
    groups = query.shape[1] // key.shape[1]
    classes, places = segments.on(query.device)

    def attended(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        of_class = classes[number]
        count, width, reach = of_class.shape
        q = query.index_select(0, of_class.queries).view(count, width, *query.shape[1:]).transpose(1, 2)
        k, v = (
            each.index_select(0, of_class.keys).view(count, reach, *each.shape[1:]).transpose(1, 2)
            for each in (key, value)
        )
        if groups > 1:
            k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
        mask = segments.mask(query.device, number, window)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
        )
        return out.transpose(1, 2).flatten(0, 1)

    again = partial(checkpoint, attended, use_reentrant=False) if segments.pieces else attended
    outputs = [again(number, query, key, value) for number in range(len(classes))]
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together.index_select(0, places)


def _pieces(segment: QuerySegment, window: int | None) -> list[QuerySegment]:
    """Cut a segment's queries so that each piece has at most :data:`MOST_PAIRS` pairs with the keys in its reach."""
    reach = len(segment.keys)
    if segment.length * reach <= LONG_PAIRS:
        return [segment]
    width = max(1, MOST_PAIRS // reach)
    if window is not None:
        width = max(width, min(window, MOST_PAIRS // (2 * window)))
    before = reach - segment.length
    pieces = []
    for first in range(0, segment.length, width):
        stop = min(first + width, segment.length)
        oldest = 0 if window is None else max(0, before + first - window + 1)
        pieces.append(QuerySegment(segment.start + first, stop - first, segment.keys[oldest : before + stop]))
    return pieces


def _class(segments: Sequence[QuerySegment]) -> _Class:
    width, reach = max(each.length for each in segments), max(len(each.keys) for each in segments)
    starts = torch.tensor([each.start for each in segments])[:, None]
    lengths = torch.tensor([each.length for each in segments])[:, None]
    reaches = torch.tensor([len(each.keys) for each in segments])[:, None]
    columns = torch.arange(width).minimum(lengths - 1)
    keys = torch.stack([_repeated_last(each.keys, reach) for each in segments])
    whole = all(each.length == len(each.keys) for each in segments)
    shape = len(segments), width, reach
    return _Class(shape, (starts + columns).flatten(), keys.flatten(), reaches - lengths + columns, whole)


def _repeated_last(keys: Tensor, count: int) -> Tensor:
    return torch.cat([keys, keys[-1:].expand(count - len(keys))])


def _size_class(length: int) -> int:
    return math.ceil(CLASSES_PER_DOUBLING * math.log2(length))
