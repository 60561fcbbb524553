"""Products of tokens with the adapters of their spans, and the gradients through them.

A layer adds ``scale * x A^T B^T`` to the frozen product (Hu et al. 2021), on each span with the span's own adapter. One
span is computed by itself (:class:`InTurn`). Several are computed in buckets of spans of similar length, each by
batched products with the stacked adapters, which lower ranks join with zeros (:class:`InBuckets`), or, where they are
alike, by the grouped kernels of a GPU (:class:`ByKernels`).

Legend: ``N`` tokens, padding included; ``I``, ``O`` features in and out; ``R`` rank; in a bucket ``G`` spans and ``W``
tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from gradwire_losses.batch import sent
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from gradwire_server.engine.model.layers.cpu_kernels import sampling_kernels
from gradwire_server.engine.model.layers.exact_products import exact_product
from gradwire_server.engine.model.layers.packed_linear import MOST_ROWS
from gradwire_server.engine.model.packing import Bucket, Segment, bucket_of

MOST_PADDING = 64
"""Tokens that padding a span to another's length may add: about the cost of the calls for a bucket of its own."""
LEAST_SHARE = 0.25
"""Smallest length of a span over that of the longest one in its bucket."""


class Span(NamedTuple):
    """Tokens computed with an adapter: ``start <= place < stop`` on the flattened token axis; None is its end."""

    adapter: str
    start: int = 0
    stop: int | None = None


class AdapterProducts(Protocol):
    """Computes the products of all spans of a layer; ``pairs`` are the spans' A ``[R, I]`` and B ``[O, R]``."""

    def add(self, output: Tensor, tokens: Tensor, pairs: Sequence[Tensor]) -> list[Tensor]:
        """Add the products with ``tokens [N, I]`` to ``output [N, O]``; returns what :meth:`gradients` needs."""

    def gradients(
        self, grad: Tensor, tokens: Tensor, saved: Sequence[Tensor], pairs: Sequence[Tensor], into: Tensor | None
    ) -> list[Tensor]:
        """The gradients of the pairs, given that of the output; adds that of the tokens to ``into``, if given."""


def add_adapter(output: Tensor, tokens: Tensor, a: Tensor, b: Tensor, scale: float, *, exact: bool = False) -> Tensor:
    """Add ``scale * x A^T B^T`` to ``output [N, O]``; returns ``x A^T``, ``[N, R]``.

    A sampler's few rows go through a kernel in which a row's bits do not depend on the others, and all rows of an
    ``exact`` model.
    """
    if exact:
        inner = exact_product(tokens, a)
        output.add_(exact_product(inner, b), alpha=scale)
        return inner
    kernels = sampling_kernels(output, tokens, a, b) if len(tokens) <= MOST_ROWS else None
    if kernels is None or torch.is_grad_enabled():
        inner = F.linear(tokens, a)
        output.addmm_(inner, b.T, alpha=scale)
        return inner
    inner = kernels.small_product(tokens, a)
    kernels.small_product(inner, b, scale, into=output)
    return inner


@dataclass(frozen=True)
class InTurn:
    """One span after another."""

    spans: Sequence[Span]
    scales: Sequence[float]
    exact: bool = False

    def add(self, output: Tensor, tokens: Tensor, pairs: Sequence[Tensor]) -> list[Tensor]:
        saved = []
        for span, scale, a, b in zip(self.spans, self.scales, pairs[::2], pairs[1::2], strict=True):
            saved.append(add_adapter(_rows(output, span), _rows(tokens, span), a, b, scale, exact=self.exact))
        return saved

    def gradients(
        self, grad: Tensor, tokens: Tensor, saved: Sequence[Tensor], pairs: Sequence[Tensor], into: Tensor | None
    ) -> list[Tensor]:
        grads = []
        for span, scale, inner, a, b in zip(self.spans, self.scales, saved, pairs[::2], pairs[1::2], strict=True):
            own = _rows(grad, span)
            through = own @ b
            grads.append((through.T @ _rows(tokens, span)).mul_(scale))
            grads.append((own.T @ inner).mul_(scale))
            if into is not None:
                _rows(into, span).addmm_(through, a, alpha=scale)
        return grads


@dataclass(frozen=True)
class ByKernels:
    """All spans by grouped kernels; ``ends`` are int32, on the device, and shapes and scales are equal."""

    ends: Tensor
    scale: float

    def add(self, output: Tensor, tokens: Tensor, pairs: Sequence[Tensor]) -> list[Tensor]:
        inner = F.grouped_mm(tokens, torch.stack(list(pairs[::2])).mT, offs=self.ends)
        output.add_(F.grouped_mm(inner, torch.stack(list(pairs[1::2])).mT, offs=self.ends), alpha=self.scale)
        return [inner]

    def gradients(
        self, grad: Tensor, tokens: Tensor, saved: Sequence[Tensor], pairs: Sequence[Tensor], into: Tensor | None
    ) -> list[Tensor]:
        a, b = torch.stack(list(pairs[::2])), torch.stack(list(pairs[1::2]))
        through = F.grouped_mm(grad, b, offs=self.ends)
        of_a = F.grouped_mm(through.T, tokens, offs=self.ends).mul_(self.scale)
        of_b = F.grouped_mm(grad.T, saved[0], offs=self.ends).mul_(self.scale)
        if into is not None:
            into.add_(F.grouped_mm(through, a, offs=self.ends), alpha=self.scale)
        return [each for pair in zip(of_a, of_b, strict=True) for each in pair]


class SpanBucket(NamedTuple):
    """Spans of similar length.

    Attributes:
        members: Their numbers among a layer's spans.
        places: Their tokens.
    """

    members: Sequence[int]
    places: Bucket


def bucketed(spans: Sequence[Span], device: torch.device) -> list[SpanBucket]:
    """Sort spans, each with its ``stop``, into buckets."""
    numbered = sorted(enumerate(map(_segment, spans)), key=lambda each: (-each[1].length, each[1].start))
    buckets: list[list[tuple[int, Segment]]] = []
    for number, segment in numbered:
        width = buckets[-1][0][1].length if buckets else 0
        if width - segment.length <= MOST_PADDING and segment.length >= LEAST_SHARE * width and buckets:
            buckets[-1].append((number, segment))
        else:
            buckets.append([(number, segment)])
    span_buckets = []
    for bucket in buckets:
        places = bucket_of([segment for _, segment in bucket])
        places = replace(
            places,
            gathered=sent(places.gathered, device),
            real=sent(places.real, device),
            places=sent(places.places, device),
        )
        span_buckets.append(SpanBucket([number for number, _ in bucket], places))
    return span_buckets


@dataclass(frozen=True)
class InBuckets:
    """All spans of a bucket at once."""

    buckets: Sequence[SpanBucket]
    scales: Sequence[float]

    def add(self, output: Tensor, tokens: Tensor, pairs: Sequence[Tensor]) -> list[Tensor]:
        saved = []
        for bucket in self.buckets:
            a, b = _stacked(bucket, pairs)
            inner = self._scaled(torch.bmm(_padded(tokens, bucket.places), a.mT), bucket)
            _add_product(output, bucket.places, inner, b.mT)
            saved += [inner, a, b]
        return saved

    def gradients(
        self, grad: Tensor, tokens: Tensor, saved: Sequence[Tensor], pairs: Sequence[Tensor], into: Tensor | None
    ) -> list[Tensor]:
        grads: list[Tensor] = list(pairs)
        for bucket, inner, a, b in zip(self.buckets, saved[::3], saved[1::3], saved[2::3], strict=True):
            own = _padded(grad, bucket.places, only_real=True)
            through = self._scaled(torch.bmm(own, b), bucket)
            of_a = torch.bmm(through.mT, _padded(tokens, bucket.places))
            of_b = torch.bmm(own.mT, inner)
            for member, grad_a, grad_b in zip(bucket.members, of_a.unbind(), of_b.unbind(), strict=True):
                rank = len(pairs[2 * member])
                grads[2 * member], grads[2 * member + 1] = grad_a[:rank], grad_b[:, :rank]
            if into is not None:
                _add_product(into, bucket.places, through, a)
        return grads

    def _scaled(self, inner: Tensor, bucket: SpanBucket) -> Tensor:
        scales = [self.scales[member] for member in bucket.members]
        if len(set(scales)) == 1:
            return inner.mul_(scales[0])
        return inner.mul_(sent(torch.tensor(scales, dtype=inner.dtype), inner.device)[:, None, None])


def _segment(span: Span) -> Segment:
    assert span.stop is not None
    return Segment(span.start, span.stop - span.start)


def _stacked(bucket: SpanBucket, pairs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``[G, R, I]`` and ``[G, O, R]``: the adapters of a bucket; those of lower rank are filled up with zeros."""
    a, b = ([pairs[2 * member + side] for member in bucket.members] for side in (0, 1))
    if len({len(each) for each in a}) == 1:
        return torch.stack(a), torch.stack(b)
    return pad_sequence(a, batch_first=True), pad_sequence([each.T for each in b], batch_first=True).mT


def _padded(tokens: Tensor, bucket: Bucket, *, only_real: bool = False) -> Tensor:
    """``[N, I] -> [G, W, I]``; a shorter span repeats its last token, or has zeros in their place."""
    if bucket.start is not None:
        taken = tokens[bucket.start : bucket.start + bucket.rows * bucket.width]
    elif only_real and len(bucket.real) < len(bucket.gathered):
        taken = tokens.new_zeros(len(bucket.gathered), tokens.shape[1])
        taken.index_copy_(0, bucket.real, tokens.index_select(0, bucket.places))
    else:
        taken = tokens.index_select(0, bucket.gathered)
    return taken.view(bucket.rows, bucket.width, -1)


def _add_product(output: Tensor, bucket: Bucket, left: Tensor, right: Tensor) -> None:
    """Add ``left [G, W, R] @ right [G, R, O]`` to the bucket's tokens in ``output [N, O]``."""
    if bucket.start is not None:
        place = output[bucket.start : bucket.start + bucket.rows * bucket.width]
        place.view(bucket.rows, bucket.width, -1).baddbmm_(left, right)
        return
    product = torch.bmm(left, right).flatten(0, 1)
    output.index_add_(0, bucket.places, product.index_select(0, bucket.real))


def _rows(tokens: Tensor, span: Span) -> Tensor:
    """The rows of a span; the tensor itself where the span is all of it, as in a short step each view counts."""
    if span.start == 0 and (span.stop is None or span.stop >= len(tokens)):
        return tokens
    return tokens[span.start : span.stop]


def alike(pairs: Sequence[Tensor], scales: Iterable[float]) -> bool:
    """Whether grouped kernels accept these pairs: equal shapes and scales, rows aligned to 16 bytes."""
    sides = (pairs[::2], pairs[1::2])
    return len(set(scales)) == 1 and all(
        len({each.shape for each in side}) == 1 and all(size * side[0].itemsize % 16 == 0 for size in side[0].shape)
        for side in sides
    )
