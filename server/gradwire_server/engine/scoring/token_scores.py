"""Scores of given tokens from hidden states, with the logits of only one chunk in memory at a time.

Legend: ``T`` places, ``H`` hidden size, ``V`` vocabulary, ``K`` token ids a place. With
``z = transform(h W^T + b) / temperature`` and ``p = softmax(z)`` at each place, computed in float32 (float64 for
float64 inputs) whatever the weights' dtype, in nats:

    log-probability of id y          log p_y                   its gradient in z: onehot(y) - p
    entropy                          -sum_v p_v log p_v                           -p (log p + entropy)
    mean log-probability             mean_v log p_v                               1 / V - p
    collision (no gradient)          log sum_v p_v^2

A chunk is some places with the whole vocabulary. A vocabulary so large that chunks would hold few places is computed in
tiles instead (:mod:`.vocabulary_tiles`), and so is, on a CPU, a head that is frozen, as with LoRA: its backward pass
needs no logits. Else that recomputes them if they are too many to keep, in tiles only those of the last tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.model.layers.exact_products import exact_kernels
from gradwire_server.engine.model.meta_device import computes_as_cpu
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.head_products import HeadGradients, HeadProduct, head_logits, parts
from gradwire_server.engine.scoring.vocabulary_tiles import ScoreRequest, ScoreTiles
from gradwire_server.engine.threads import products_apart

FEWEST_PLACES = 256
"""Chunks of fewer places are computed in tiles. Each chunk reads the whole output weight four times; at fewer places
that takes longer than what tiles cost, which is a softmax in several passes instead of torch's own."""
MOST_PLACES = 2048
"""Places of a tile."""
FROZEN_PLACES = 128
"""Places at once where the forward pass computes the gradient too: few enough that their logits stay in a cache."""


@dataclass(frozen=True)
class TokenScores:
    """Scores at ``T`` places; those not requested are empty.

    Attributes:
        logprobs: ``[T, K]`` log-probabilities of the given ids, differentiable.
        entropy: ``[T]``, differentiable.
        mean_logprobs: ``[T]`` mean over the vocabulary, differentiable.
        collision: ``[T]``, not differentiable.
        correct: ``[T]`` bool: every other id is less probable than the first of those given.
    """

    logprobs: Tensor
    entropy: Tensor
    mean_logprobs: Tensor
    collision: Tensor
    correct: Tensor

    def split(self, counts: Sequence[int]) -> list[TokenScores]:
        """The scores of each of several batches, given the numbers of their places."""
        columns = [getattr(self, each.name) for each in fields(self)]
        parts = [each.split(list(counts)) if len(each) else [each] * len(counts) for each in columns]
        return [TokenScores(*own) for own in zip(*parts, strict=True)]


def score_tokens(
    hidden: Tensor,
    head: OutputHead,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    mean_logprobs: bool = False,
    collision: bool = False,
    correct: bool = False,
    chunk_elements: int = 1 << 22,
    kept_elements: int = 0,
) -> TokenScores:
    """Compute scores of ``ids [T, K]`` given ``hidden [T, H]``.

    Args:
        temperature: Divides the logits.
        entropy, mean_logprobs, collision, correct: Whether to compute each.
        chunk_elements: Number of logits in memory at once.
        kept_elements: Number of logits that may additionally be kept for the backward pass.
    """
    differentiable = torch.is_grad_enabled()
    operands = head.operands(hidden)
    kept = kept_elements if differentiable and head.softcap is None else 0
    places, vocabulary = chunk_elements // len(head.weight), len(head.weight)
    tiled = places < min(len(ids), FEWEST_PLACES)
    if len(ids) and not tiled and not entropy and not mean_logprobs and _only_states_train(head, operands):
        tiled, places = True, min(places, FROZEN_PLACES)
    elif tiled:
        places = max(1, min(len(ids), MOST_PLACES, chunk_elements))
        vocabulary = chunk_elements // places
    request = ScoreRequest(
        head, temperature, entropy, mean_logprobs, collision, correct, differentiable, kept, max(places, 1),
        max(vocabulary, 1),
    )  # fmt: skip
    compute = ScoreTiles if tiled else _ScoreTokens
    scores = TokenScores(*compute.apply(request, ids, head.bias, *operands))  # type: ignore[no-untyped-call]
    if not head.exact:
        return scores
    exact = _exact_logprobs(hidden, head, ids, temperature, max(1, chunk_elements // len(head.weight)))
    return replace(scores, logprobs=_WithValues.apply(scores.logprobs, exact))  # type: ignore[no-untyped-call]


@torch.no_grad()
def _exact_logprobs(hidden: Tensor, head: OutputHead, ids: Tensor, temperature: float, places: int) -> Tensor:
    """``[T, K]`` log-probabilities with the bits that a sampler gives them, of so many places at a time."""
    parts = [slice(start, start + places) for start in range(0, len(ids), places)]
    found = [chosen_logprobs(token_logits(hidden[part], head, temperature=temperature), ids[part]) for part in parts]
    return torch.cat(found) if found else hidden.new_empty(ids.shape, dtype=torch.float32)


class _WithValues(torch.autograd.Function):
    """Other values, which differ by rounding alone, with the gradient of these."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def chosen_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """``[T, K]`` log-probabilities of ids given ``[T, V]`` logits of an exact head, and exact as these."""
    return exact_kernels().log_probabilities(logits, ids)


def _only_states_train(head: OutputHead, operands: Sequence[Tensor]) -> bool:
    """Whether, on a CPU, a gradient goes through the head and none into it, so that the forward pass can compute it."""
    trained = [head.bias, *operands[1::2]]
    return (
        torch.is_grad_enabled()
        and operands[0].requires_grad
        and head.softcap is None
        and not any(each is not None and each.requires_grad for each in trained)
        and computes_as_cpu(operands[0].device)
    )


def token_logits(hidden: Tensor, head: OutputHead, *, temperature: float = 1.0) -> Tensor:
    """``[T, V]`` logits over the temperature of a few states ``[T, H]``, for the sampler; no gradient."""
    with products_apart() if head.exact else nullcontext():  # as SplitModel.packed_states
        operands = head.operands(hidden)
        product = HeadProduct(operands[1::2], exact=head.exact)
        return head_logits(product, operands[::2], head.bias, head, temperature)[0]


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, request: ScoreRequest, ids: Tensor, bias: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        product = HeadProduct(operands[1::2])
        hidden, weight = operands[:2]
        count = len(ids)
        keeps = count * len(weight) <= request.kept

        def room(wanted: bool) -> Tensor:
            return hidden.new_empty(count if wanted else 0, dtype=product.dtype)

        logprobs = hidden.new_empty(ids.shape, dtype=product.dtype)
        entropy, mean, collision = room(request.entropy), room(request.mean), room(request.collision)
        correct = torch.empty(count if request.correct else 0, dtype=torch.bool, device=hidden.device)
        kept = hidden.new_empty(count if keeps else 0, len(weight), dtype=product.dtype)
        for start in range(0, count, request.places):
            part = slice(start, start + request.places)
            place = kept[part] if keeps else None
            log_p, _ = _log_probabilities(product, parts(operands[::2], part), bias, request, place)
            chosen = log_p.gather(1, ids[part])
            logprobs[part] = chosen
            if request.correct:
                top = log_p.amax(dim=-1, keepdim=True)
                correct[part] = (chosen[:, :1] >= top)[:, 0] & ((log_p == top).sum(dim=-1) == 1)
            if request.mean:
                mean[part] = log_p.mean(dim=-1)
            if request.entropy or request.collision:
                p = log_p.exp()
                if request.entropy:
                    entropy[part] = -torch.linalg.vecdot(p, log_p)
                if request.collision:
                    collision[part] = torch.linalg.vecdot(p, p).log()
        ctx.save_for_backward(ids, entropy, kept, bias, *operands)
        ctx.request = request
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            correct, collision, *([] if request.entropy else [entropy]), *([] if request.mean else [mean])
        )
        return logprobs, entropy, mean, collision, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_mean: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        ids, entropy, kept, bias, *operands = ctx.saved_tensors
        request: ScoreRequest = ctx.request
        if grad_logprobs is None:
            grad_logprobs = entropy.new_zeros(ids.shape)
        keeps = len(kept) > 0
        product, weight = HeadProduct(operands[1::2]), operands[1]
        # Not the saved tensor, because saved-tensor hooks would return something other than the parameter.
        holder = request.head.weight if request.head.adds_in_place else None
        gradients = HeadGradients(product, operands, bias, ctx.needs_input_grad[2:], holder)
        of_p = grad_logprobs.sum(dim=1)
        if grad_mean is not None:
            of_p = of_p + grad_mean
        for start in range(0, len(ids), request.places):
            part = slice(start, start + request.places)
            if keeps:
                log_p, capped = kept[part], None
                p = log_p.exp()
            else:
                log_p, capped = _log_probabilities(product, parts(operands[::2], part), bias, request)
                p = log_p.exp_() if grad_entropy is None else log_p.exp()
            if grad_entropy is not None:
                grad = (log_p + entropy[part, None]) if keeps else log_p.add_(entropy[part, None])
                grad = grad.mul_(grad_entropy[part, None]).add_(of_p[part, None]).mul_(p).neg_()
            else:
                grad = p.mul_(-of_p[part, None])
            if grad_mean is not None:
                grad += grad_mean[part, None] / len(weight)
            grad.scatter_add_(1, ids[part], grad_logprobs[part])
            gradients.add(part, grad, capped, request.head, request.temperature)
        return None, None, *gradients.results()


def _log_probabilities(
    product: HeadProduct,
    states: Sequence[Tensor],
    bias: Tensor | None,
    request: ScoreRequest,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[C, V]`` log-probabilities for states of ``C`` places, in ``place`` if given; :func:`head_logits`' second."""
    logits, capped = head_logits(product, states, bias, request.head, request.temperature, place)
    if not computes_as_cpu(logits.device):
        return torch.log_softmax(logits, dim=-1, out=place), capped
    return torch.log_softmax(logits, dim=-1, out=logits), capped
