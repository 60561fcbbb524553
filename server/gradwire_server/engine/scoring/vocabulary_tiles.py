"""Scores of given tokens in tiles: some places by a part of the vocabulary, with a running softmax.

Legend: ``T`` places, ``C`` places of a tile, ``U`` token ids of a tile, ``K`` token ids a place. Over the tiles of a
place the forward pass keeps the largest logit ``m`` and, relative to it, the sums ``s = sum exp(z - m)``,
``sum exp(z - m) (z - m)`` and ``sum exp(z - m)^2``; when ``m`` grows, the sums are scaled (Milakov and Gimelshein
2018, arXiv:1805.02867). So ``log p = z - m - log s`` is exact whatever the number of tiles, and the weight is read once
in the forward pass and twice in the backward pass, however few logits are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.head_products import HeadGradients, HeadProduct, head_logits, parts


@dataclass(frozen=True)
class ScoreRequest:
    """Which scores to compute, and how.

    Attributes:
        head: The output head.
        temperature: Divides the logits.
        entropy, mean, collision, correct: Whether to compute each.
        keeps: Whether to keep the logits of all places for the backward pass.
        places: Maximum places at once.
        vocabulary: Maximum token ids at once.
    """

    head: OutputHead
    temperature: float
    entropy: bool
    mean: bool
    collision: bool
    correct: bool
    keeps: bool
    places: int
    vocabulary: int


class ScoreTiles(torch.autograd.Function):
    """The scores of :func:`.token_scores.score_tokens`, in its order."""

    @staticmethod
    def forward(
        ctx: Any, request: ScoreRequest, ids: Tensor, bias: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        product = HeadProduct(operands[1::2])
        hidden, weight = operands[:2]
        kept: list[Tensor] = []
        sums = []
        for part in _slices(len(ids), request.places):
            running = _RunningSoftmax(hidden[part], ids[part], product.dtype, request)
            for vocabulary in _slices(len(weight), request.vocabulary):
                logits, _ = _tile(product, parts(operands[::2], part), bias, vocabulary, request)
                if request.keeps:
                    kept.append(logits)
                running.add(logits, vocabulary)
            sums.append(running)
        top = torch.cat([each.top for each in sums])
        log_sum = torch.cat([each.sum for each in sums]).log()
        chosen = torch.cat([each.chosen for each in sums])
        empty = top.new_empty(0)
        entropy = mean = collision = empty
        if request.entropy:
            entropy = log_sum - torch.cat([each.weighted for each in sums]) / log_sum.exp()
        if request.mean:
            mean = torch.cat([each.total for each in sums]) / len(weight) - top - log_sum
        if request.collision:
            collision = torch.cat([each.squares for each in sums]).log() - 2 * log_sum
        correct = (chosen[:, 0] >= top) if request.correct else empty.bool()
        ctx.save_for_backward(ids, entropy, top, log_sum, bias, *operands, *kept)
        ctx.operands = len(operands)
        ctx.request = request
        ctx.mark_non_differentiable(
            correct, collision, *([] if request.entropy else [entropy]), *([] if request.mean else [mean])
        )
        return chosen - top[:, None] - log_sum[:, None], entropy, mean, collision, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_mean: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        ids, entropy, top, log_sum, bias, *rest = ctx.saved_tensors
        operands, kept = rest[: ctx.operands], rest[ctx.operands :]
        request: ScoreRequest = ctx.request
        product, weight = HeadProduct(operands[1::2]), operands[1]
        # Not the saved tensor, because saved-tensor hooks would return something other than the parameter.
        holder = request.head.weight if request.head.adds_in_place else None
        gradients = HeadGradients(product, operands, bias, ctx.needs_input_grad[2:], holder)
        of_p = grad_logprobs.sum(dim=1)
        if request.mean:
            of_p = of_p + grad_mean
        tiles = iter(kept)
        for part in _slices(len(ids), request.places):
            for vocabulary in _slices(len(weight), request.vocabulary):
                if request.keeps:
                    logits, capped = next(tiles), None
                    shifted = logits - top[part, None]
                else:
                    logits, capped = _tile(product, parts(operands[::2], part), bias, vocabulary, request)
                    shifted = logits.sub_(top[part, None])
                if request.entropy:
                    log_p = shifted.sub_(log_sum[part, None])
                    p = log_p.exp()
                    grad = log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                    grad = grad.add_(of_p[part, None]).mul_(p).neg_()
                else:
                    grad = shifted.exp_().mul_((-of_p[part] / log_sum[part].exp())[:, None])
                if request.mean:
                    grad += grad_mean[part, None] / len(weight)
                column, inside = _columns(ids[part], vocabulary)
                grad.scatter_add_(1, column, grad_logprobs[part] * inside)
                gradients.add(part, grad, capped, request.head, request.temperature, vocabulary)
        return None, None, *gradients.results()


class _RunningSoftmax:
    """Sums over the vocabulary of ``C`` places, as the module says; ``chosen [C, K]`` are the logits of the ids."""

    def __init__(self, states: Tensor, ids: Tensor, dtype: torch.dtype, request: ScoreRequest) -> None:
        self._ids, self._request = ids, request
        self.top = states.new_full((len(ids),), -torch.inf, dtype=dtype)
        self.sum = torch.zeros_like(self.top)
        self.weighted = torch.zeros_like(self.top)
        self.squares = torch.zeros_like(self.top)
        self.total = torch.zeros_like(self.top)
        self.chosen = states.new_zeros(ids.shape, dtype=dtype)

    def add(self, logits: Tensor, vocabulary: slice) -> None:
        """Add a tile ``[C, U]`` of logits; overwrites it unless logits are kept."""
        column, inside = _columns(self._ids, vocabulary)
        self.chosen = torch.where(inside, logits.gather(1, column), self.chosen)
        if self._request.mean:
            self.total += logits.sum(dim=1)
        top = torch.maximum(self.top, logits.amax(dim=1))
        # Before the first tile all sums are zero, and so is what they are multiplied with and added to.
        change = torch.where(self.sum > 0, self.top - top, 0.0)
        scale = change.exp()
        shifted = logits - top[:, None] if self._request.keeps else logits.sub_(top[:, None])
        if self._request.entropy:
            p = shifted.exp()
            self.weighted = scale * (self.weighted + change * self.sum) + torch.linalg.vecdot(p, shifted)
        else:
            p = shifted.exp_()
        if self._request.collision:
            self.squares = scale.square() * self.squares + torch.linalg.vecdot(p, p)
        self.sum = scale * self.sum + p.sum(dim=1)
        self.top = top


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _tile(
    product: HeadProduct, states: Sequence[Tensor], bias: Tensor | None, vocabulary: slice, request: ScoreRequest
) -> tuple[Tensor, Tensor | None]:
    some = None if bias is None else bias[vocabulary]
    return head_logits(product.part(vocabulary), states, some, request.head, request.temperature)


def _columns(ids: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor]:
    """Columns of ids within a tile, and which ids are in it; the columns of the others are any."""
    inside = (ids >= vocabulary.start) & (ids < vocabulary.stop)
    return (ids - vocabulary.start).clamp(0, vocabulary.stop - vocabulary.start - 1), inside
