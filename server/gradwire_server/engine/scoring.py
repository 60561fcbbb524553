"""Scores of given tokens from hidden states, without ever holding the logits of more than a chunk of them.

Legend: ``T`` tokens, ``H`` hidden size, ``V`` vocabulary. With ``z = transform(h W^T + b) / temperature`` and
``p = softmax(z)`` at each token, computed in float32 (float64 for float64 inputs) whatever the weights' dtype:
log-probability ``log p_y`` of target ``y`` and entropy ``-sum_v p_v log p_v``, in nats. The backward pass computes
each chunk's logits again:

    d log p_y / dz = onehot(y) - p          d entropy / dz = -p (log p + entropy)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.host import OutputHead


@dataclass(frozen=True)
class TokenScores:
    """Of ``T`` tokens.

    Attributes:
        logprobs: ``[T]``, differentiable.
        entropy: ``[T]``, differentiable; None unless asked for.
        correct: ``[T]`` bool, whether the target is the most probable token.
    """

    logprobs: Tensor
    entropy: Tensor | None
    correct: Tensor


def score_tokens(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_elements: int = 1 << 22,
) -> TokenScores:
    """Scores of ``targets [T]`` given ``hidden [T, H]``.

    Args:
        temperature: divides the logits.
        entropy: whether to compute it.
        chunk_elements: logits in memory at once.
    """
    chunk = max(1, chunk_elements // head.weight.shape[0])
    logprobs, entropies, correct = _ScoreTokens.apply(
        hidden, head.weight, head.bias, targets, head, temperature, entropy, chunk
    )
    return TokenScores(logprobs, entropies if entropy else None, correct)


def token_logits(hidden: Tensor, head: OutputHead, *, temperature: float = 1.0) -> Tensor:
    """``[T, V]`` logits over the temperature of few tokens' states ``[T, H]``; no gradient."""
    return _logits(_Product(head.weight), hidden, head.bias, head, temperature)[0]


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        product = _Product(weight)
        count = len(targets)
        logprobs = hidden.new_empty(count, dtype=product.dtype)
        entropy = hidden.new_empty(count if with_entropy else 0, dtype=product.dtype)
        normalizers = hidden.new_empty(count, dtype=product.dtype)
        correct = torch.empty(count, dtype=torch.bool, device=hidden.device)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(product, hidden[part], bias, head, temperature)[0]
            largest, best = logits.max(dim=-1)
            correct[part] = best == targets[part]
            logits -= largest[:, None]
            target = logits.gather(1, targets[part, None]).squeeze(1)
            if with_entropy:
                exponentials = logits.exp()
                total = exponentials.sum(dim=-1)
                entropy[part] = total.log() - torch.linalg.vecdot(exponentials, logits) / total
            else:
                total = logits.exp_().sum(dim=-1)
            logprobs[part] = target - total.log()
            normalizers[part] = largest + total.log()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.head, ctx.temperature, ctx.with_entropy, ctx.chunk = head, temperature, with_entropy, chunk
        ctx.mark_non_differentiable(correct)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_correct: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        head: OutputHead = ctx.head
        product = _Product(weight)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=product.dtype, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(len(weight), dtype=product.dtype, device=weight.device) if need_bias else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            states = hidden[part]
            logits, capped = _logits(product, states, bias, head, ctx.temperature)
            log_p = logits.sub_(normalizers[part, None])
            if ctx.with_entropy:
                p = log_p.exp()
                weights = log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
                grad = p.mul_(weights).neg_()
            else:
                grad = log_p.exp_().mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad.mul_(head.scale / ctx.temperature)
            if head.softcap is not None:
                assert capped is not None
                grad.mul_(1.0 - capped.square())
            if grad_hidden is not None:
                grad_hidden[part] = product.by_weight(grad)
            if grad_weight is not None:
                product.add_outer(grad_weight, grad, states)
            if grad_bias is not None:
                # The scale multiplies the bias too: transform is of h W^T + b.
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *([None] * 5),
        )


def _logits(
    product: _Product, states: Tensor, bias: Tensor | None, head: OutputHead, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """``[C, V]`` logits over the temperature, and tanh of the soft cap's argument where there is one."""
    logits = product.by_transpose(states)
    if bias is not None:
        logits += bias
    if head.scale != 1.0:
        logits *= head.scale
    capped = None
    if head.softcap is not None:
        capped = logits.div_(head.softcap).tanh_()
        logits = capped * head.softcap
    return (logits if temperature == 1.0 else logits.div_(temperature)), capped


class _Product:
    """Products with the output weight that accumulate in, and give, float32 at least.

    CUDA multiplies low-precision operands so without widening them; elsewhere the weight is widened once.
    """

    def __init__(self, weight: Tensor) -> None:
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.mixed = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
        self.weight = weight if self.mixed else weight.to(self.dtype)

    def by_transpose(self, states: Tensor) -> Tensor:
        """``[C, H] -> [C, V]``."""
        if self.mixed:
            return torch.mm(states, self.weight.T, out_dtype=self.dtype)
        return states.to(self.dtype) @ self.weight.T

    def by_weight(self, grad: Tensor) -> Tensor:
        """``[C, V] -> [C, H]``."""
        if self.mixed:
            return torch.mm(grad.to(self.weight.dtype), self.weight, out_dtype=self.dtype)
        return grad @ self.weight

    def add_outer(self, total: Tensor, grad: Tensor, states: Tensor) -> None:
        """``total [V, H] += grad^T [V, C] states [C, H]``."""
        if self.mixed:
            total += torch.mm(grad.to(states.dtype).T, states, out_dtype=self.dtype)
        else:
            total.addmm_(grad.T, states.to(self.dtype))
