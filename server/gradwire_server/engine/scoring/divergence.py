"""Divergence between a student's and a teacher's distributions over the vocabulary, one chunk of logits at a time.

Legend: ``T`` places, ``H`` and ``H'`` hidden sizes, ``V`` vocabulary. With ``S`` the student's distribution at a place,
``T`` the teacher's and ``M = beta T + (1 - beta) S``, in float32 (float64 for float64 inputs), in nats:

    beta 0        KL(T || S)                                    its gradient in the student's logits: S - T
    beta 1        KL(S || T)                                          S (log S - log T - KL(S || T))
    between       beta KL(T || M) + (1 - beta) KL(S || M)             (1 - beta) S (log S - log M - KL(S || M))

This is the generalised Jensen-Shannon divergence of Agarwal et al. 2023, arXiv 2306.13649, which defines its ends so.
The backward pass recomputes each chunk's logits. The teacher gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.head_products import HeadGradients, HeadProduct, head_logits, parts


def score_divergence(
    hidden: Tensor,
    head: OutputHead,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    *,
    beta: float,
    temperature: float = 1.0,
    chunk_elements: int = 1 << 22,
) -> Tensor:
    """Divergence ``[T]``, differentiable in the student, given ``hidden [T, H]`` and ``teacher_hidden [T, H']``.

    Args:
        beta: Choice of divergence, from 0 to 1.
        temperature: Divides the logits of both.
        chunk_elements: Number of the student's logits in memory at once.
    """
    request = _Request(head, teacher_head, beta, temperature, max(1, chunk_elements // len(head.weight)))
    divergence: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        request, teacher_hidden.detach(), head.bias, *head.operands(hidden)
    )
    return divergence


@dataclass(frozen=True)
class _Request:
    head: OutputHead
    teacher: OutputHead
    beta: float
    temperature: float
    chunk: int


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _Request, teacher_hidden: Tensor, bias: Tensor | None, *operands: Tensor) -> Tensor:
        product, teacher = HeadProduct(operands[1::2]), request.teacher.operands(teacher_hidden)
        of_teacher, hidden = HeadProduct(teacher[1::2]), operands[0]
        result = hidden.new_empty(len(hidden), dtype=product.dtype)
        for start in range(0, len(hidden), request.chunk):
            part = slice(start, start + request.chunk)
            states = parts(operands[::2], part)
            student = head_logits(product, states, bias, request.head, request.temperature)[0].log_softmax(-1)
            taught = _teacher(of_teacher, parts(teacher[::2], part), request, product.dtype)
            if request.beta == 0:
                result[part] = _kl(taught, student)
            elif request.beta == 1:
                result[part] = _kl(student, taught)
            else:
                mixture = _mixture(student, taught, request.beta)
                result[part] = request.beta * _kl(taught, mixture) + (1 - request.beta) * _kl(student, mixture)
        ctx.save_for_backward(teacher_hidden, bias, *operands)
        ctx.request = request
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_divergence: Tensor) -> tuple[Tensor | None, ...]:
        teacher_hidden, bias, *operands = ctx.saved_tensors
        request: _Request = ctx.request
        product, teacher = HeadProduct(operands[1::2]), request.teacher.operands(teacher_hidden)
        of_teacher = HeadProduct(teacher[1::2])
        gradients = HeadGradients(product, operands, bias, ctx.needs_input_grad[2:])
        for start in range(0, len(teacher_hidden), request.chunk):
            part = slice(start, start + request.chunk)
            states = parts(operands[::2], part)
            logits, capped = head_logits(product, states, bias, request.head, request.temperature)
            student = logits.log_softmax(-1)
            taught = _teacher(of_teacher, parts(teacher[::2], part), request, product.dtype)
            if request.beta == 0:
                grad = student.exp() - taught.exp()
            else:
                other = taught if request.beta == 1 else _mixture(student, taught, request.beta)
                probability, difference = student.exp(), student - other
                mean = torch.linalg.vecdot(probability, difference)
                grad = probability * (difference - mean[:, None])
                if request.beta != 1:
                    grad *= 1 - request.beta
            grad *= grad_divergence[part, None]
            gradients.add(part, grad, capped, request.head, request.temperature)
        return None, None, *gradients.results()


def _teacher(product: HeadProduct, states: Sequence[Tensor], request: _Request, dtype: torch.dtype) -> Tensor:
    head = request.teacher
    return head_logits(product, states, head.bias, head, request.temperature)[0].log_softmax(-1).to(dtype)


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Kullback-Leibler divergence from log-probabilities: ``[C, V], [C, V] -> [C]``."""
    divergence: Tensor = torch.linalg.vecdot(first.exp(), first - second)
    return divergence
