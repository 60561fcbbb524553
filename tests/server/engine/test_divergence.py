"""The chunked divergence against plain torch, and by gradient check."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.divergence import score_divergence
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T, H, V = 11, 6, 17
BETAS = [0.0, 0.1, 0.5, 1.0]


def student_and_teacher(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, OutputHead]:
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randn(T, H + 2, dtype=dtype), OutputHead(torch.randn(V, H + 2, dtype=dtype))


def plain(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """From logits, each divergence by its definition."""
    s, t = F.softmax(student, -1), F.softmax(teacher, -1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum(-1)

    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    mixture = beta * t + (1 - beta) * s
    return beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk_elements", [1, 4 * V, 10**6])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equals_its_definition(beta: float, chunk_elements: int, softcap: float | None) -> None:
    hidden, weight, bias, teacher_hidden, teacher_head = student_and_teacher()
    head = OutputHead(weight, bias, 0.8, softcap)
    found = score_divergence(
        hidden, head, teacher_hidden, teacher_head, beta=beta, temperature=0.7, chunk_elements=chunk_elements
    )
    student = head.transform(hidden @ weight.T + bias) / 0.7
    expected = plain(student, teacher_hidden @ teacher_head.weight.T / 0.7, beta)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(T, dtype=torch.float64)
    ours = torch.autograd.grad(found, (hidden, weight, bias), upstream)
    theirs = torch.autograd.grad(expected, (hidden, weight, bias), upstream)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta: float) -> None:
    hidden, weight, bias, teacher_hidden, teacher_head = student_and_teacher()

    def score(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = OutputHead(weight, bias)
        return score_divergence(hidden, head, teacher_hidden, teacher_head, beta=beta, chunk_elements=3 * V)

    assert torch.autograd.gradcheck(score, (hidden, weight, bias))


@pytest.mark.parametrize("beta", BETAS)
def test_is_zero_with_zero_gradient_between_equals(beta: float) -> None:
    hidden, weight, bias, *_ = student_and_teacher()
    head = OutputHead(weight, bias)
    found = score_divergence(hidden, head, hidden.detach(), OutputHead(weight.detach(), bias.detach()), beta=beta)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-14, rtol=0)
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().max() < 1e-12


@pytest.mark.parametrize("beta", BETAS)
def test_distant_distributions_stay_finite(beta: float) -> None:
    hidden = torch.ones(2, 1, requires_grad=True)
    student, teacher = torch.tensor([[1e4], [-1e4], [0.0]]), torch.tensor([[-1e4], [1e4], [0.0]])
    found = score_divergence(hidden, OutputHead(student), torch.ones(2, 1), OutputHead(teacher), beta=beta)
    found.sum().backward()
    assert found.isfinite().all()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_logits_are_never_materialised_for_more_than_a_chunk() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return result

    tokens, vocabulary, chunk = 256, 512, 16 * 512
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    teacher = OutputHead(torch.randn(vocabulary, 4))
    with Largest() as largest:
        score_divergence(
            hidden, OutputHead(weight), torch.randn(tokens, 4), teacher, beta=0.5, chunk_elements=chunk
        ).sum().backward()
    assert largest.numel <= chunk
