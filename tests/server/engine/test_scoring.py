"""Token scores against plain softmax, and by gradient check."""

from __future__ import annotations

import math

import pytest
import torch
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.token_scores import score_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T, H, V = 13, 8, 21


class Largest(TorchDispatchMode):
    """The most elements that a tensor made within has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def tensors(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randn(V, dtype=dtype, requires_grad=True) if bias else None, torch.randint(V, (T, 3))


def plain(hidden: Tensor, head: OutputHead, ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-probabilities, entropy, mean log-probability, collision, and whether the first id is the most probable."""
    logits = hidden @ head.weight.T + (0.0 if head.bias is None else head.bias)
    log_p = torch.log_softmax(head.transform(logits) / temperature, dim=-1)
    p = log_p.exp()
    return (
        log_p.gather(1, ids),
        -(p * log_p).sum(-1),
        log_p.mean(-1),
        p.square().sum(-1).log(),
        log_p.argmax(-1) == ids[:, 0],
    )


@pytest.mark.parametrize("chunk_elements", [1, 3 * V, 10**6])
@pytest.mark.parametrize("kept_elements", [0, T * V])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (1.0, 3.0), (2.0, 5.0)])
def test_equals_plain_softmax(
    chunk_elements: int, kept_elements: int, temperature: float, scale: float, softcap: float | None
) -> None:
    hidden, weight, bias, ids = tensors(torch.float64)
    assert bias is not None
    head = OutputHead(weight, bias, scale, softcap)
    scores = score_tokens(
        hidden,
        head,
        ids,
        temperature=temperature,
        entropy=True,
        mean_logprobs=True,
        collision=True,
        correct=True,
        chunk_elements=chunk_elements,
        kept_elements=kept_elements,
    )
    expected = plain(hidden, head, ids, temperature)
    found = (scores.logprobs, scores.entropy, scores.mean_logprobs, scores.collision, scores.correct)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference)
    upstream = [torch.randn_like(score) for score in found[:3]]
    ours = torch.autograd.grad(found[:3], (hidden, weight, bias), upstream)
    theirs = torch.autograd.grad(expected[:3], (hidden, weight, bias), upstream)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("chunk_elements", [1, 3 * V, 10**6])
@pytest.mark.parametrize("kept_elements", [0, T * V])
def test_a_tie_is_not_correct(chunk_elements: int, kept_elements: int) -> None:
    """A model whose logits are all equal knows nothing. Ties are within a tile and between tiles."""
    bias = torch.zeros(V)
    bias[[2, V - 1]] = 1.0
    ids, where = torch.tensor([[2], [V - 1], [0]]), {"chunk_elements": chunk_elements, "kept_elements": kept_elements}
    for given, expected in ((torch.zeros(V), [False] * 3), (bias, [False] * 3), (bias.cumsum(0), [False, True, False])):
        head = OutputHead(torch.zeros(V, H), given, 1.0, None)
        assert score_tokens(torch.randn(3, H), head, ids, correct=True, **where).correct.tolist() == expected


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("kept", [0, pytest.param(T * V, marks=pytest.mark.slow)])
def test_gradcheck(entropy: bool, mean: bool, softcap: float | None, kept: int) -> None:
    hidden, weight, bias, targets = tensors(torch.float64)

    def score(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        head = OutputHead(weight, bias, 0.8, softcap)
        scores = score_tokens(
            hidden,
            head,
            targets,
            temperature=1.3,
            entropy=entropy,
            mean_logprobs=mean,
            chunk_elements=4 * V,
            kept_elements=kept,
        )
        wanted = ((True, scores.logprobs), (entropy, scores.entropy), (mean, scores.mean_logprobs))
        return tuple(score for asked, score in wanted if asked)

    assert torch.autograd.gradcheck(score, (hidden, weight, bias))


@pytest.mark.parametrize("graded", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("kept", [0, 5 * V, T * V])
@pytest.mark.parametrize("trained", [(0, 1, 2), (0, 1), (1,), (0, 2), (0,)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_tiles_have_the_gradient_of_plain_softmax(
    graded: tuple[int, ...], kept: int, trained: tuple[int, ...], softcap: float | None
) -> None:
    """Whichever of the scores have one, in whichever of states, weight and bias it is wanted."""
    *given, ids = tensors(torch.float64)
    hidden, weight, bias = (
        value.detach().requires_grad_(place in trained) for place, value in enumerate(given) if value is not None
    )
    head = OutputHead(weight, bias, 0.8, softcap)
    found = score_tokens(
        hidden, head, ids, temperature=0.7, entropy=1 in graded, mean_logprobs=True, collision=True, correct=True,
        chunk_elements=3 * V, kept_elements=kept,
    )  # fmt: skip
    expected = plain(hidden, head, ids, 0.7)
    torch.testing.assert_close(found.collision, expected[3])
    ours, theirs = ([each[number] for number in graded] for each in (list(vars(found).values()), expected))
    upstream = [torch.randn_like(score) for score in ours]
    wanted = [(hidden, weight, bias)[place] for place in trained]
    for _ in range(2):
        mine = torch.autograd.grad(ours, wanted, upstream, retain_graph=True)
        reference = torch.autograd.grad(theirs, wanted, upstream, retain_graph=True)
        for one, other in zip([*ours, *mine], [*theirs, *reference], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [3 * V, 1 << 22], ids=["tiles", "whole"])
def test_kept_logits_serve_two_backward_passes_and_change_no_bit(entropy: bool, chunk: int) -> None:
    hidden, weight, _, ids = tensors(bias=False)
    found = []
    for kept in (0, 5 * V, T * V):
        scores = score_tokens(
            hidden, OutputHead(weight), ids, entropy=entropy, chunk_elements=chunk, kept_elements=kept
        )
        sums = scores.logprobs.sum() + scores.entropy.sum()
        found += [torch.autograd.grad(sums, (hidden, weight), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(one, other) for pair in found[1:] for one, other in zip(pair, found[0], strict=True))


def test_the_weight_accumulates_its_gradient_in_place() -> None:
    hidden, weight, _, ids = tensors(bias=False)
    (expected,) = torch.autograd.grad(score_tokens(hidden, OutputHead(weight), ids).logprobs.sum(), weight)

    def backward() -> Tensor | None:
        head = OutputHead(weight, adds_in_place=True)
        score_tokens(hidden, head, ids, chunk_elements=V).logprobs.sum().backward()
        return weight.grad

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        first = backward()
    assert first is not None
    torch.testing.assert_close(first, expected)
    assert backward() is first
    torch.testing.assert_close(first, 2 * expected)


def test_frozen_head_gets_no_gradient_and_hidden_does() -> None:
    hidden, weight, _, targets = tensors(bias=False)
    scores = score_tokens(hidden, OutputHead(weight.detach()), targets)
    scores.logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert weight.grad is None


def test_with_a_frozen_head_the_forward_computes_the_gradient_and_keeps_no_logits() -> None:
    tokens, vocabulary = 300, 512
    hidden = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    head = OutputHead(torch.randn(vocabulary, 4, dtype=torch.float64), scale=0.8)
    ids, upstream = torch.randint(vocabulary, (tokens, 3)), torch.randn(tokens, 3, dtype=torch.float64)
    with Largest() as forward:
        scores = score_tokens(hidden, head, ids, temperature=0.7, correct=True, kept_elements=tokens * vocabulary)
    assert forward.numel <= 128 * vocabulary
    with Largest() as backward:
        scores.logprobs.backward(upstream)
    assert backward.numel <= tokens * 4
    expected = plain(hidden, head, ids, 0.7)
    torch.testing.assert_close(scores.logprobs, expected[0])
    assert torch.equal(scores.correct, expected[4])
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected[0], hidden, upstream)[0])


def test_no_tokens_give_no_scores_and_zero_gradients() -> None:
    hidden, weight, _, _ = tensors(bias=False)
    scores = score_tokens(hidden[:0], OutputHead(weight), torch.zeros(0, 1, dtype=torch.int64), entropy=True)
    assert scores.logprobs.shape == (0, 1) and scores.entropy.shape == (0,)
    scores.logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    hidden = torch.ones(3, 1, requires_grad=True)
    scores = score_tokens(hidden, OutputHead(weight), torch.tensor([[0], [1], [2]]), entropy=True)
    torch.testing.assert_close(scores.logprobs, torch.tensor([[0.0], [-2e4], [-1e4]]))
    torch.testing.assert_close(scores.entropy, torch.zeros(3))
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_low_precision_weights_are_multiplied_in_float32() -> None:
    hidden, weight, _, targets = tensors(torch.bfloat16, bias=False)
    scores = score_tokens(hidden, OutputHead(weight), targets, entropy=True)
    expected, entropy, *_ = plain(hidden.float(), OutputHead(weight.float()), targets, 1.0)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=1e-5)
    scores.logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_logits_are_never_materialised_for_more_than_a_chunk() -> None:
    tokens, vocabulary, chunk = 256, 512, 16 * 512
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    with Largest() as largest:
        scores = score_tokens(
            hidden, OutputHead(weight), torch.randint(vocabulary, (tokens, 1)), entropy=True, chunk_elements=chunk
        )
        scores.logprobs.sum().backward()
    assert largest.numel <= chunk
    assert math.isfinite(scores.logprobs.sum().item())
