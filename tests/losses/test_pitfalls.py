"""The mistakes that others made and fixed, each as the shortest batch that shows it.

On whole distributions where that is what tells right from wrong: a policy over three tokens, the loss averaged over
all of its samples, the gradient taken with respect to its logits. Those that take a model, a server
or other parts of the code to show have their tests there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradwire_losses.advantages import gae, whiten
from gradwire_losses.batch import Scores
from gradwire_losses.kl import kl_estimate
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import get_loss
from support.losses import merged, read
from torch import Tensor

"""The pitfalls of the issue, and the functions, by file, that test them."""

POLICY = torch.tensor([0.2, -0.5, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.4, 0.9, 0.3], dtype=torch.float64)


def evaluate(loss: str, columns: dict[str, Any], scores: dict[str, Tensor], **kwargs: Any) -> LossOutput:
    spec = get_loss(loss)
    return spec.function(read(spec, columns), Scores(scores), spec.config(**kwargs))


def expected(values: Callable[[Tensor, Tensor], Tensor], logits: Tensor) -> Tensor:
    """The mean over the policy's samples, whose weights have no gradient, of a figure of their log-probabilities."""
    logprobs = logits.log_softmax(0)
    return (logprobs.detach().exp() * values(logprobs, REFERENCE.log_softmax(0))).sum()


def exact_kl(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - REFERENCE.log_softmax(0))).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_is_that_of_the_policy_to_the_reference_and_not_the_other_way(estimator: Any) -> None:
    mean = expected(lambda p, q: kl_estimate(p, q, estimator), POLICY).item()
    assert mean == pytest.approx(exact_kl(POLICY).item(), rel=1e-12)
    reverse = (REFERENCE.softmax(0) * (REFERENCE.log_softmax(0) - POLICY.log_softmax(0))).sum().item()
    assert mean != pytest.approx(reverse, rel=1e-3)


def test_which_estimator_has_the_gradient_of_the_kl() -> None:
    """k2's is the KL's; k1's is zero, whatever the reference; k3's is that of the KL the other way."""
    logits = POLICY.clone().requires_grad_()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits)[0]

    exact = gradient(exact_kl(logits))
    k1, k2, k3 = (gradient(expected(lambda p, q, k=kind: kl_estimate(p, q, k), logits)) for kind in ("k1", "k2", "k3"))
    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k1, torch.zeros_like(exact))
    forward = -(REFERENCE.softmax(0) * logits.log_softmax(0)).sum()
    torch.testing.assert_close(k3, gradient(forward))


def test_what_is_distilled_is_the_teacher_and_not_the_student() -> None:
    """Top-k distillation is KL(teacher || student); on-policy distillation has KL(student || teacher)'s gradient."""
    teacher = REFERENCE.log_softmax(0)
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    columns = {
        "input_ids": [[0, 1]],
        "teacher_token_ids": [[[0, 1, 2]] * 2],
        "teacher_log_probs": [[teacher.tolist()] * 2],
    }
    found = evaluate("top_k_distillation", columns, {"candidate_logprobs": logprobs[None]}).loss()
    forward = (teacher.exp() * (teacher - logprobs)).sum()
    torch.testing.assert_close(found, forward, rtol=1e-6, atol=1e-6)

    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        columns = {"input_ids": [[0, token]], "ref_log_probs": [[teacher[token].item()]]}
        output = evaluate("on_policy_distillation", columns, {"logprobs": logprobs[token : token + 1]})
        total = total + logprobs[token].exp().detach() * output.loss()
    [grad] = torch.autograd.grad(total, logits, retain_graph=True)
    [reverse] = torch.autograd.grad(exact_kl(logits), logits)
    torch.testing.assert_close(grad, reverse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "field"), [("enhanced_ppo", "old_log_probs"), ("importance_sampling", "behavior_log_probs")]
)
def test_on_policy_the_gradient_is_the_policy_gradient(loss: str, field: str) -> None:
    """Of E[r]: sum over tokens of p(x) r(x) grad log p(x), with a step of descent going up."""
    rewards = [1.0, -2.0, 0.5]
    kwargs = {"whiten_advantages": False} if loss == "enhanced_ppo" else {}
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        columns = {"input_ids": [[0, token]], field: [[logprobs[token].item()]], "rewards": [rewards[token]]}
        scores = {"logprobs": logprobs[token : token + 1], "entropy": torch.zeros(1, dtype=torch.float64)}
        scores["values"] = torch.zeros(1, dtype=torch.float64)
        total = total + logprobs[token].exp().detach() * evaluate(loss, columns, scores, **kwargs).loss()
    [grad] = torch.autograd.grad(total, logits)
    logits = POLICY.clone().requires_grad_()
    [ascent] = torch.autograd.grad((logits.softmax(0) * torch.tensor(rewards)).sum(), logits)
    # The batch's log-probabilities are float32.
    torch.testing.assert_close(grad, -ascent, rtol=1e-6, atol=1e-7)


def test_prompt_tokens_are_not_in_the_loss() -> None:
    columns = {"input_ids": [[1, 2, 3, 4]], "prompt_lengths": [2]}
    assert read("causal_lm", columns).scored.tolist() == [False, False, True, True]
    pair = {"chosen_input_ids": [[1, 2, 3]], "rejected_input_ids": [[1, 2, 4, 5]], "prompt_lengths": [2]}
    assert read("dpo", pair).row_lengths.tolist() == [1, 2]


def test_nothing_is_shifted_by_one() -> None:
    """Rewards, masks and old log-probabilities of token t meet the score of token t."""
    columns = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 1]], "rewards": [[7.0, 8.0, 9.0]]}
    batch = read("enhanced_ppo", columns | {"old_log_probs": [[-1.0, -2.0, -3.0]]})
    assert batch["rewards"].tolist() == [9.0] and batch["old_log_probs"].tolist() == [-3.0]


def test_one_token_rows_and_masked_rows_count_nowhere() -> None:
    alone = {"input_ids": [[1, 2, 3]]}
    among = {"input_ids": [[5], [1, 2, 3], [6, 7]], "loss_mask": [[1], [1, 1, 1], [0, 0]]}
    scores = {"logprobs": torch.tensor([-1.0, -3.0]), "correct": torch.tensor([True, False])}
    for kwargs in ({}, {"reduction": "sequence_mean"}):
        assert (
            evaluate("causal_lm", alone, scores, **kwargs).loss()
            == evaluate("causal_lm", among, scores, **kwargs).loss()
        )


def test_accumulation_is_by_tokens_and_not_by_means_of_calls() -> None:
    """A call of 1 token and one of 3: the mean is over 4 tokens, and not the mean of two means."""
    scores = {"correct": torch.tensor([True])}
    short = evaluate("causal_lm", {"input_ids": [[1, 2]]}, scores | {"logprobs": torch.tensor([-8.0])})
    long = evaluate(
        "causal_lm",
        {"input_ids": [[1, 2, 3, 4]]},
        {"logprobs": torch.tensor([-1.0, -1.0, -2.0]), "correct": torch.tensor([True] * 3)},
    )
    loss, metrics = merged([short, long])
    assert loss == 3.0
    assert metrics["perplexity"] == pytest.approx(math.exp(3.0))


def test_truncated_is_not_terminated() -> None:
    """A cut-off row has more to come: its last state's successor has a value."""
    rewards, values, lengths = torch.zeros(2), torch.zeros(2), torch.tensor([1, 1])
    advantages, _ = gae(rewards, values, lengths, gamma=0.5, bootstrap_values=torch.tensor([0.0, 4.0]))
    assert advantages.tolist() == [0.0, 2.0]


def test_nothing_leaks_from_infinities_that_are_not_scored() -> None:
    columns = {
        "input_ids": [[1, 2, 3]],
        "loss_mask": [[0, 1, 0]],
        "old_log_probs": [[-math.inf, -1.0, math.nan]],
        "rewards": [[math.nan, 1.0, math.inf]],
    }
    scores = {name: torch.zeros(1, requires_grad=True) for name in ("logprobs", "entropy", "values")}
    output = evaluate("enhanced_ppo", columns, scores)
    output.loss().backward()
    assert math.isfinite(output.loss().item())
    assert all(leaf.grad is not None and torch.isfinite(leaf.grad).all() for leaf in scores.values())


def test_impossible_tokens_of_no_weight_are_no_nan() -> None:
    """0 * -inf is NaN: a target that counts nothing may be impossible."""
    columns = {"input_ids": [[1, 2]], "target_tokens": [[2, 3]], "weights": [[0.0, 1.0]]}
    logprobs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    loss = evaluate("cross_entropy", columns, {"logprobs": logprobs}).loss()
    loss.backward()
    assert loss.item() == 1.0 and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()


def test_whitening_one_advantage_is_no_division_by_zero() -> None:
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten(torch.tensor([2.0, 2.0])).tolist() == [0.0, 0.0]
    assert whiten(torch.zeros(0)).tolist() == []


def test_log_probabilities_of_another_temperature_show_as_a_ratio_that_is_not_one() -> None:
    """What a batch taken at temperature 2 looks like when the call says 1: the metrics tell, before the weights do."""
    sampled = (POLICY / 2).log_softmax(0)
    columns = {"input_ids": [[0, 0, 1, 2]], "old_log_probs": [sampled.tolist()], "rewards": [1.0]}
    right, wrong = (
        evaluate(
            "enhanced_ppo",
            columns,
            {"logprobs": logprobs, "entropy": torch.ones(3, dtype=torch.float64), "values": torch.zeros(3).double()},
        ).metrics["approx_kl"]
        for logprobs in (sampled, POLICY.log_softmax(0))
    )
    assert right.value() == pytest.approx(0.0, abs=1e-12)
    assert wrong.value() > 0.01


def test_a_temperature_belongs_to_every_policy_loss_and_not_to_rewards() -> None:
    from gradwire_losses.registry import TemperatureConfig, all_losses

    policy = {loss.name for loss in all_losses() if "temperature" in loss.config.model_fields}
    of_logits = {loss.name for loss in all_losses() if issubclass(loss.config, TemperatureConfig)}
    assert {"enhanced_ppo", "grpo", "ppo", "importance_sampling"} <= of_logits
    assert policy - of_logits <= {"reward_modeling", "plackett_luce"}, "there it divides rewards"
