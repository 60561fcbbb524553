"""Scores of given tokens in tiles: some places by a part of the vocabulary, with a running softmax.

Legend: ``T`` places, ``C`` places of a tile, ``U`` token ids of a tile, ``K`` token ids a place. Over the tiles of a
place the forward pass keeps the largest logit ``m`` and, relative to it, the sums ``s = sum exp(z - m)``,
``sum exp(z - m) (z - m)`` and ``sum exp(z - m)^2``; when ``m`` grows, the sums are scaled (Milakov and Gimelshein
2018, arXiv:1805.02867). So ``log p = z - m - log s`` is exact whatever the number of tiles.

What is kept of a tile for the backward pass are its exponentials ``e = exp(z - m)`` with the ``m`` of that moment; a
tile that is not kept is computed again, with the same bits. Where only log-probabilities have a gradient, on a CPU, no
pass over the logits is left for the backward: with ``p = a e``, ``a`` a number for each place, the gradient in the
states is ``-g a (e W)`` plus the rows of ``W`` of the given ids, and that in the weight ``-e^T (g a h)`` plus states.

Where moreover the weight is frozen, as with LoRA, the forward pass sums ``p W`` as it sums ``s`` (as attention does in
Dao et al. 2022, arXiv:2205.14135). Its backward pass needs no logits, and nothing of their size is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.model.meta_device import computes_as_cpu
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.head_products import HeadGradients, HeadProduct, head_logits, parts

LEAST_LOG = -1e3
"""Stands for the logarithm of an exponential that is zero in float32 or float64, and so is what it is multiplied by."""


@dataclass(frozen=True)
class ScoreRequest:
    """The scores to compute, and how.

    Attributes:
        temperature: Divides the logits.
        entropy, mean, collision, correct: Whether to compute each.
        differentiable: Whether a backward pass may follow.
        kept: Maximum number of logits kept for it.
        places: Maximum places at once.
        vocabulary: Maximum token ids at once.
    """

    head: OutputHead
    temperature: float
    entropy: bool
    mean: bool
    collision: bool
    correct: bool
    differentiable: bool
    kept: int
    places: int
    vocabulary: int


class ScoreTiles(torch.autograd.Function):
    """The scores of :func:`.token_scores.score_tokens`, in its order."""

    @staticmethod
    def forward(
        ctx: Any, request: ScoreRequest, ids: Tensor, bias: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        product = HeadProduct(operands[1::2])
        hidden, weight = operands[:2]
        of_bias, *needed = ctx.needs_input_grad[2:]
        differentiable = request.differentiable and any(needed[::2])
        frozen = differentiable and request.head.softcap is None and not (of_bias or any(needed[1::2]))
        means = [
            states.new_zeros(len(ids), other.shape[1], dtype=product.dtype)
            for states, other in zip(operands[::2], operands[1::2], strict=True)
            if frozen
        ]
        tiles = _Tiles(request, len(ids), len(weight), 0 if frozen else request.kept, product.dtype, hidden.device)
        logits_place = tiles.room() if request.entropy else None
        tops: list[Tensor] = []
        sums: list[_RunningSoftmax] = []
        for part in tiles.parts:
            running = _RunningSoftmax(hidden[part], ids[part], product.dtype, request)
            sums.append(running)
            for vocabulary in tiles.vocabularies:
                place = tiles.place(len(tops), part, vocabulary)
                room = place if logits_place is None else _shaped(logits_place, part, vocabulary)
                own = product.part(vocabulary)
                logits, _ = _tile_logits(own, parts(operands[::2], part), bias, vocabulary, request, room)
                scale = running.add(logits, place, vocabulary)
                tops.append(running.top)
                for mean, factor in zip(means, own.factors, strict=False):
                    factor.add_by_weight(mean[part].mul_(scale[:, None]), place)
        top = torch.cat([each.top for each in sums])
        total = torch.cat([each.sum for each in sums])
        log_sum = total.log()
        chosen = torch.cat([each.chosen for each in sums])
        empty = top.new_empty(0)
        entropy = mean_logprobs = collision = empty
        if request.entropy:
            entropy = log_sum - torch.cat([each.weighted for each in sums]) / total
        if request.mean:
            mean_logprobs = torch.cat([each.total for each in sums]) / len(weight) - top - log_sum
        if request.collision:
            collision = torch.cat([each.squares for each in sums]).log() - 2 * log_sum
        correct = empty.bool()
        if request.correct:
            correct = (chosen[:, 0] >= top) & (torch.cat([each.num_top for each in sums]) == 1)
        for mean in means:
            mean.div_(total[:, None])
        ctx.save_for_backward(ids, entropy, top, log_sum, bias, tiles.kept, *tops, *means, *operands)
        ctx.counts = len(tops), len(means)
        ctx.request = request
        ctx.mark_non_differentiable(
            correct, collision, *([] if request.entropy else [entropy]), *([] if request.mean else [mean_logprobs])
        )
        return chosen - top[:, None] - log_sum[:, None], entropy, mean_logprobs, collision, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_mean: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        ids, entropy, top, log_sum, bias, kept, *rest = ctx.saved_tensors
        num_tiles, num_means = ctx.counts
        tops, means, operands = rest[:num_tiles], rest[num_tiles : num_tiles + num_means], rest[num_tiles + num_means :]
        request: ScoreRequest = ctx.request
        product, (hidden, weight) = HeadProduct(operands[1::2]), operands[:2]
        if grad_logprobs is None:
            grad_logprobs = log_sum.new_zeros(ids.shape)
        # Not the saved tensor, because saved-tensor hooks would return something other than the parameter.
        holder = request.head.weight if request.head.adds_in_place else None
        gradients = HeadGradients(product, operands, bias, ctx.needs_input_grad[2:], holder)
        of_p = grad_logprobs.sum(dim=1)
        if grad_mean is not None:
            of_p = of_p + grad_mean
        factor = request.head.scale / request.temperature
        only_logprobs = grad_entropy is None and grad_mean is None
        if only_logprobs and means:
            gradients.add_means(means, of_p * -factor)
            gradients.add_chosen(ids, grad_logprobs * factor)
            return None, None, *gradients.results()
        by_products = only_logprobs and request.head.softcap is None and computes_as_cpu(hidden.device)
        tiles = _Tiles(request, len(ids), len(weight), kept, product.dtype, hidden.device)
        index = 0
        for part in tiles.parts:
            for vocabulary in tiles.vocabularies:
                e, tile_top, capped = tiles.place(index, part, vocabulary), tops[index], None
                if index >= tiles.num_kept:
                    logits, capped = _tile_logits(
                        product.part(vocabulary), parts(operands[::2], part), bias, vocabulary, request, e
                    )
                    e = logits.sub_(tile_top[:, None]).exp_()
                index += 1
                share = (tile_top - top[part] - log_sum[part]).exp_()  # of the exponentials in the probabilities
                if by_products:
                    gradients.add_exponentials(part, e, share * of_p[part] * -factor, vocabulary)
                    continue
                if grad_entropy is None:
                    grad = e * (-of_p[part] * share)[:, None]
                else:
                    log_p = e.log().clamp_(min=LEAST_LOG).add_((tile_top - top[part] - log_sum[part])[:, None])
                    grad = log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(of_p[part, None])
                    grad = grad.mul_(e).mul_(-share[:, None])
                if grad_mean is not None:
                    grad += grad_mean[part, None] / len(weight)
                column, inside = _columns(ids[part], vocabulary)
                grad.scatter_add_(1, column, grad_logprobs[part] * inside)
                gradients.add(part, grad, capped, request.head, request.temperature, vocabulary)
        if by_products:
            gradients.add_chosen(ids, grad_logprobs * factor)
        return None, None, *gradients.results()


class _Tiles:
    """The tiles of all places, those of a place one after another, and the memory that each is computed in.

    Args:
        kept: Maximum number of elements of tiles with memory of their own, or that memory itself. The first ones have
            some; all others are computed in the same place.

    Attributes:
        parts: Places of tiles.
        vocabularies: Token ids of tiles.
        kept: Memory of the tiles that have their own.
        num_kept: Number of these tiles.
    """

    def __init__(
        self,
        request: ScoreRequest,
        count: int,
        size: int,
        kept: int | Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = list(_slices(count, request.places))
        self.vocabularies = list(_slices(size, request.vocabulary))
        # Each begins at a multiple of 64 bytes, because a product's last bits may depend on that.
        self._stride = -(-min(request.places, count) * min(request.vocabulary, size) // 16) * 16
        self._dtype, self._device = dtype, device
        if isinstance(kept, int):
            number = min(len(self.parts) * len(self.vocabularies), kept // self._stride) if self._stride else 0
            kept = self._memory(number * self._stride)
        self.kept = kept
        self.num_kept = len(kept) // self._stride if self._stride else 0
        self._shared: Tensor | None = None

    def room(self) -> Tensor:
        """Memory for any one tile."""
        return self._memory(self._stride)

    def place(self, index: int, part: slice, vocabulary: slice) -> Tensor:
        """``[C, U]`` the place of a tile, given its number."""
        if index < self.num_kept:
            return _shaped(self.kept[index * self._stride :], part, vocabulary)
        if self._shared is None:
            self._shared = self.room()
        return _shaped(self._shared, part, vocabulary)

    def _memory(self, elements: int) -> Tensor:
        return torch.empty(elements, dtype=self._dtype, device=self._device)


class _RunningSoftmax:
    """Sums over the vocabulary of ``C`` places, as the module says; ``chosen [C, K]`` are the logits of the ids."""

    def __init__(self, states: Tensor, ids: Tensor, dtype: torch.dtype, request: ScoreRequest) -> None:
        self._ids, self._request = ids, request
        self.top = states.new_full((len(ids),), -torch.inf, dtype=dtype)
        self.sum = torch.zeros_like(self.top)
        self.num_top = torch.zeros_like(self.top)
        self.weighted = torch.zeros_like(self.top)
        self.squares = torch.zeros_like(self.top)
        self.total = torch.zeros_like(self.top)
        self.chosen = states.new_zeros(ids.shape, dtype=dtype)

    def add(self, logits: Tensor, place: Tensor, vocabulary: slice) -> Tensor:
        """Add a tile ``[C, U]`` of logits, which is overwritten, and write its exponentials to ``place``.

        Args:
            place: May be the logits themselves, but not with entropy.

        Returns:
            ``[C]`` what sums over earlier tiles are to be multiplied by.
        """
        column, inside = _columns(self._ids, vocabulary)
        self.chosen = torch.where(inside, logits.gather(1, column), self.chosen)
        if self._request.mean:
            self.total += logits.sum(dim=1)
        top = torch.maximum(self.top, logits.amax(dim=1))
        # Before the first tile all sums are zero, and so is what they are multiplied with and added to.
        change = torch.where(self.sum > 0, self.top - top, 0.0)
        scale = change.exp()
        shifted = logits.sub_(top[:, None])
        p = torch.exp(shifted, out=place)
        if self._request.correct:
            self.num_top = torch.where(change < 0, 0.0, self.num_top) + (p == 1).sum(dim=1)
        if self._request.entropy:
            self.weighted = scale * (self.weighted + change * self.sum) + shifted.mul_(p).sum(dim=1)
        if self._request.collision:
            self.squares = scale.square() * self.squares + torch.linalg.vecdot(p, p)
        self.sum = scale * self.sum + p.sum(dim=1)
        self.top = top
        return scale


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _shaped(memory: Tensor, part: slice, vocabulary: slice) -> Tensor:
    """The first elements as ``[C, U]``."""
    rows, columns = part.stop - part.start, vocabulary.stop - vocabulary.start
    return memory[: rows * columns].view(rows, columns)


def _tile_logits(
    product: HeadProduct,
    states: Sequence[Tensor],
    bias: Tensor | None,
    vocabulary: slice,
    request: ScoreRequest,
    place: Tensor,
) -> tuple[Tensor, Tensor | None]:
    some = None if bias is None else bias[vocabulary]
    return head_logits(product, states, some, request.head, request.temperature, place)


def _columns(ids: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor]:
    """Columns of ids within a tile, and which ids are in it; the columns of the others are any."""
    inside = (ids >= vocabulary.start) & (ids < vocabulary.stop)
    return (ids - vocabulary.start).clamp(0, vocabulary.stop - vocabulary.start - 1), inside
