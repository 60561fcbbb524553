"""Scores of given tokens from hidden states, with the logits of only one chunk in memory at a time.

Legend: ``T`` places, ``H`` hidden size, ``V`` vocabulary, ``K`` token ids a place. With
``z = transform(h W^T + b) / temperature`` and ``p = softmax(z)`` at each place, computed in float32 (float64 for
float64 inputs) whatever the weights' dtype, in nats:

    log-probability of id y          log p_y                   its gradient in z: onehot(y) - p
    entropy                          -sum_v p_v log p_v                           -p (log p + entropy)
    mean log-probability             mean_v log p_v                               1 / V - p
    collision (no gradient)          log sum_v p_v^2

The backward pass recomputes each chunk's logits, unless the logits of all places are few enough to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.model.split_model import OutputHead


@dataclass(frozen=True)
class TokenScores:
    """Scores at ``T`` places; those not requested are empty.

    Attributes:
        logprobs: ``[T, K]`` log-probabilities of the given ids, differentiable.
        entropy: ``[T]``, differentiable.
        mean_logprobs: ``[T]`` mean over the vocabulary, differentiable.
        collision: ``[T]``, not differentiable.
        correct: ``[T]`` bool: no id is more probable than the first of those given.
    """

    logprobs: Tensor
    entropy: Tensor
    mean_logprobs: Tensor
    collision: Tensor
    correct: Tensor


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
    keeps = torch.is_grad_enabled() and head.softcap is None and len(ids) * len(head.weight) <= kept_elements
    chunk = max(1, chunk_elements // len(head.weight))
    request = _Request(head, temperature, entropy, mean_logprobs, collision, correct, chunk, keeps)
    return TokenScores(*_ScoreTokens.apply(hidden, head.weight, head.bias, ids, request))  # type: ignore[no-untyped-call]


def token_logits(hidden: Tensor, head: OutputHead, *, temperature: float = 1.0) -> Tensor:
    """``[T, V]`` logits over the temperature of a few states ``[T, H]``, for the sampler; no gradient."""
    return head_logits(HeadProduct(head.weight), hidden, head.bias, head, temperature)[0]


@dataclass(frozen=True)
class _Request:
    head: OutputHead
    temperature: float
    entropy: bool
    mean: bool
    collision: bool
    correct: bool
    chunk: int
    keeps: bool


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, request: _Request
    ) -> tuple[Tensor, ...]:
        product = HeadProduct(weight)
        count = len(ids)

        def room(wanted: bool) -> Tensor:
            return hidden.new_empty(count if wanted else 0, dtype=product.dtype)

        logprobs = hidden.new_empty(ids.shape, dtype=product.dtype)
        entropy, mean, collision = room(request.entropy), room(request.mean), room(request.collision)
        correct = torch.empty(count if request.correct else 0, dtype=torch.bool, device=hidden.device)
        kept = hidden.new_empty(count if request.keeps else 0, len(weight), dtype=product.dtype)
        for start in range(0, count, request.chunk):
            part = slice(start, start + request.chunk)
            place = kept[part] if request.keeps else None
            log_p, _ = _log_probabilities(product, hidden[part], bias, request, place)
            chosen = log_p.gather(1, ids[part])
            logprobs[part] = chosen
            if request.correct:
                correct[part] = chosen[:, 0] >= log_p.amax(dim=-1)
            if request.mean:
                mean[part] = log_p.mean(dim=-1)
            if request.entropy or request.collision:
                p = log_p.exp()
                if request.entropy:
                    entropy[part] = -torch.linalg.vecdot(p, log_p)
                if request.collision:
                    collision[part] = torch.linalg.vecdot(p, p).log()
        ctx.save_for_backward(hidden, weight, bias, ids, entropy, kept)
        ctx.request = request
        ctx.mark_non_differentiable(
            correct, collision, *([] if request.entropy else [entropy]), *([] if request.mean else [mean])
        )
        return logprobs, entropy, mean, collision, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_mean: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, entropy, kept = ctx.saved_tensors
        request: _Request = ctx.request
        product = HeadProduct(weight)
        # Not the saved tensor, because saved-tensor hooks would return something other than the parameter.
        holder = request.head.weight if request.head.adds_in_place else None
        gradients = HeadGradients(product, hidden, weight, bias, ctx.needs_input_grad, holder)
        of_p = grad_logprobs.sum(dim=1)
        if request.mean:
            of_p = of_p + grad_mean
        for start in range(0, len(ids), request.chunk):
            part = slice(start, start + request.chunk)
            if request.keeps:
                log_p, capped = kept[part], None
                p = log_p.exp()
            else:
                log_p, capped = _log_probabilities(product, hidden[part], bias, request)
                p = log_p.exp() if request.entropy else log_p.exp_()
            if request.entropy:
                grad = (log_p + entropy[part, None]) if request.keeps else log_p.add_(entropy[part, None])
                grad = grad.mul_(grad_entropy[part, None]).add_(of_p[part, None]).mul_(p).neg_()
            else:
                grad = p.mul_(-of_p[part, None])
            if request.mean:
                grad += grad_mean[part, None] / len(weight)
            grad.scatter_add_(1, ids[part], grad_logprobs[part])
            gradients.add(part, grad, capped, request.head, request.temperature)
        return *gradients.results(), None, None


def _log_probabilities(
    product: HeadProduct, states: Tensor, bias: Tensor | None, request: _Request, place: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``[C, V]`` log-probabilities for ``[C, H]`` states, in ``place`` if given, and :func:`head_logits`' second."""
    logits, capped = head_logits(product, states, bias, request.head, request.temperature, place)
    if logits.is_cuda:
        return torch.log_softmax(logits, dim=-1, out=place), capped
    return torch.log_softmax(logits, dim=-1, out=logits), capped


def head_logits(
    product: HeadProduct,
    states: Tensor,
    bias: Tensor | None,
    head: OutputHead,
    temperature: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[C, V]`` logits over the temperature, and tanh of the soft cap's argument if there is a soft cap.

    Args:
        place: Tensor to write the logits to; with a soft cap or mixed precision the result is another tensor.
    """
    logits = product.by_transpose(states, place)
    if bias is not None:
        logits += bias
    if head.softcap is not None:
        capped = logits.mul_(head.scale / head.softcap).tanh_()
        return capped * (head.softcap / temperature), capped
    factor = head.scale / temperature
    return (logits if factor == 1.0 else logits.mul_(factor)), None


class HeadGradients:
    """Required gradients of hidden states, output weight and bias, summed chunk by chunk.

    Args:
        holder: The weight as a parameter. If it has the precision of the products, its ``grad`` takes the gradient
            directly: with a vocabulary of 100,000 or more, a second such tensor would dominate a step's peak memory.
    """

    def __init__(
        self,
        product: HeadProduct,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
        holder: Tensor | None = None,
    ) -> None:
        self._product, self._hidden = product, hidden
        self._dtypes = (weight.dtype, None if bias is None else bias.dtype)
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._of_weight = None
        self._held = holder is not None and needed[1] and holder.dtype == product.dtype
        if holder is not None and self._held:
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder)
            self._of_weight = holder.grad
        elif needed[1]:
            self._of_weight = torch.zeros(weight.shape, dtype=product.dtype, device=weight.device)
        self._of_bias = torch.zeros(len(weight), dtype=product.dtype, device=weight.device) if needed[2] else None

    def add(self, part: slice, grad: Tensor, capped: Tensor | None, head: OutputHead, temperature: float) -> None:
        """Add a chunk's share, given the gradient ``[C, V]`` in its logits from :func:`head_logits`; overwrites it."""
        if capped is not None:
            grad.mul_(1.0 - capped.square())
        factor = head.scale / temperature
        if factor != 1.0:
            grad.mul_(factor)
        if self._of_hidden is not None:
            self._of_hidden[part] = self._product.by_weight(grad)
        if self._of_weight is not None:
            self._product.add_outer(self._of_weight, grad, self._hidden[part])
        if self._of_bias is not None:
            self._of_bias += grad.sum(dim=0)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight, bias = self._dtypes
        return (
            self._of_hidden,
            None if self._of_weight is None or self._held else self._of_weight.to(weight),
            None if self._of_bias is None or bias is None else self._of_bias.to(bias),
        )


class HeadProduct:
    """Products with the output weight that accumulate in, and return, at least float32.

    CUDA multiplies low-precision operands this way without widening them; elsewhere the weight is widened once.
    """

    def __init__(self, weight: Tensor) -> None:
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.mixed = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
        self.weight = weight if self.mixed else weight.to(self.dtype)

    def by_transpose(self, states: Tensor, place: Tensor | None = None) -> Tensor:
        """Product with the transposed weight: ``[C, H] -> [C, V]``."""
        if self.mixed:
            return torch.mm(states.to(self.weight.dtype), self.weight.T, out_dtype=self.dtype)
        if place is None:
            return states.to(self.dtype) @ self.weight.T
        return torch.mm(states.to(self.dtype), self.weight.T, out=place)

    def by_weight(self, grad: Tensor) -> Tensor:
        """Product with the weight: ``[C, V] -> [C, H]``."""
        if self.mixed:
            return torch.mm(grad.to(self.weight.dtype), self.weight, out_dtype=self.dtype)
        return grad @ self.weight

    def add_outer(self, total: Tensor, grad: Tensor, states: Tensor) -> None:
        """Add the weight's gradient: ``total [V, H] += grad^T [V, C] states [C, H]``."""
        if self.mixed:
            low = self.weight.dtype
            total += torch.mm(grad.to(low).T, states.to(low), out_dtype=self.dtype)
        else:
            total.addmm_(grad.T, states.to(self.dtype))
