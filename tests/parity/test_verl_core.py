"""Estimators, KL, aggregation and the value loss against verl 0.9.1's ``core_algos``.

verl's rows are padded; a sequence's outcome reward is at its last token.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gradwire_losses import advantages as ours
from gradwire_losses.batch import pad
from gradwire_losses.critic import Critique, value_losses
from gradwire_losses.kl import kl_estimate
from gradwire_losses.reduction import ReductionConfig, reduced

core = pytest.importorskip("verl.trainer.ppo.core_algos")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Data:
    """Three groups of 3, 2 and 4 responses, each of 1 to 8 tokens."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.sizes = torch.tensor([3, 2, 4])
        self.index = np.repeat(np.arange(3), self.sizes.numpy())
        self.lengths = torch.from_numpy(rng.integers(1, 9, 9))
        tokens = int(self.lengths.sum())
        self.per_token = torch.from_numpy(rng.normal(size=tokens))
        self.values = torch.from_numpy(rng.normal(size=tokens))
        self.other = torch.from_numpy(rng.normal(size=tokens))
        self.outcomes = torch.from_numpy(rng.normal(size=9))
        self.mask = pad(self.per_token, self.lengths)[1].double()

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        return pad(values, self.lengths)[0]

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        return padded[self.mask.bool()]

    @property
    def outcome_rows(self) -> torch.Tensor:
        return self.padded(ours.at_last_token(self.outcomes, self.lengths))

    def over_tokens(self, per_sequence: torch.Tensor) -> torch.Tensor:
        return per_sequence.repeat_interleave(self.lengths)


def test_gae(rng: np.random.Generator) -> None:
    """verl whitens within; its returns are not masked."""
    data = Data(rng)
    theirs, returns = core.compute_gae_advantage_return(
        data.padded(data.per_token), data.padded(data.values), data.mask, 0.97, 0.9
    )
    own, own_returns = ours.gae(data.per_token, data.values, data.lengths, gamma=0.97, gae_lambda=0.9)
    torch.testing.assert_close(ours.whiten(own), data.flat(theirs), **CLOSE)
    torch.testing.assert_close(own_returns, data.flat(returns), **CLOSE)


@pytest.mark.parametrize("scale", [True, False])
def test_grpo(scale: bool, rng: np.random.Generator) -> None:
    data = Data(rng)
    theirs, _ = core.compute_grpo_outcome_advantage(
        data.outcome_rows, data.mask, data.index, epsilon=ours.GROUP_STD_FLOOR, norm_adv_by_std_in_grpo=scale
    )
    own = ours.group_advantages(data.outcomes, data.sizes, scale=scale)
    torch.testing.assert_close(data.over_tokens(own), data.flat(theirs), **CLOSE)


@pytest.mark.parametrize("name", ["rloo", "opo", "reinforce_plus_plus_baseline"])
def test_outcome_baselines(name: str, rng: np.random.Generator) -> None:
    data = Data(rng)
    theirs, _ = getattr(core, f"compute_{name}_outcome_advantage")(
        token_level_rewards=data.outcome_rows, response_mask=data.mask, index=data.index
    )
    own = {
        "rloo": lambda: data.over_tokens(ours.rloo_advantages(data.outcomes, data.sizes)),
        "opo": lambda: data.over_tokens(ours.opo_advantages(data.outcomes, data.lengths, data.sizes)),
        "reinforce_plus_plus_baseline": lambda: ours.whiten(
            data.over_tokens(ours.group_advantages(data.outcomes, data.sizes, scale=False))
        ),
    }[name]()
    torch.testing.assert_close(own, data.flat(theirs), **CLOSE)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_group_of_one_has_no_baseline_and_verl_gives_it_its_raw_reward(name: str) -> None:
    """A lone response's reward says nothing of it relative to others: we give 0, so that it teaches nothing."""
    mask, rewards = torch.ones(1, 2), torch.tensor([[0.0, 3.0]])
    theirs, _ = getattr(core, f"compute_{name}_outcome_advantage")(
        token_level_rewards=rewards, response_mask=mask, index=np.array([0])
    )
    assert theirs[0, 0].item() == pytest.approx(3.0, rel=1e-5)
    one, reward = torch.tensor([1]), torch.tensor([3.0])
    own = {
        "grpo": lambda: ours.group_advantages(reward, one),
        "rloo": lambda: ours.rloo_advantages(reward, one),
        "opo": lambda: ours.opo_advantages(reward, torch.tensor([2]), one),
    }[name]()
    assert own.item() == 0.0


def test_reinforce_plus_plus(rng: np.random.Generator) -> None:
    data = Data(rng)
    theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(
        data.padded(data.per_token), data.mask, config=SimpleNamespace(gamma=0.9)
    )
    own = ours.whiten(ours.rewards_to_go(data.per_token, data.lengths, 0.9))
    torch.testing.assert_close(own, data.flat(theirs), **CLOSE)


@pytest.mark.parametrize(("estimator", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl(estimator: str, name: str, rng: np.random.Generator) -> None:
    data = Data(rng)
    policy, reference = -data.per_token.abs().clamp(max=2), -data.values.abs().clamp(max=2)  # verl cuts k3 at 10
    torch.testing.assert_close(
        kl_estimate(policy, reference, estimator),  # type: ignore[arg-type]
        core.kl_penalty(policy, reference, name),
        **CLOSE,
    )


def test_verl_cuts_k3_where_its_gradient_is_needed_most() -> None:
    """Where the reference makes a token much likelier, verl clamps k3 to 10, without gradient; ours draws back."""
    policy = torch.tensor([-30.0], requires_grad=True)
    reference = torch.tensor([-1.0])
    [theirs] = torch.autograd.grad(core.kl_penalty(policy, reference, "low_var_kl").sum(), policy)
    [own] = torch.autograd.grad(kl_estimate(policy, reference, "k3").sum(), policy)
    assert theirs.item() == 0.0
    assert own.item() < -1.0


@pytest.mark.parametrize(
    ("reduction", "mode"),
    [
        ("token_mean", "token-mean"),
        ("sequence_mean", "seq-mean-token-mean"),
        ("sequence_mean_token_sum", "seq-mean-token-sum"),
        ("fixed", "seq-mean-token-sum-norm"),
        ("sum", "token-sum"),
    ],
)
def test_aggregation(reduction: str, mode: str, rng: np.random.Generator) -> None:
    data = Data(rng)
    config = ReductionConfig(reduction=reduction, reduction_divisor=8.0 if reduction == "fixed" else None)
    term = reduced(data.per_token, data.lengths, config)
    theirs = core.agg_loss(data.padded(data.per_token), data.mask, mode, loss_scale_factor=8)
    torch.testing.assert_close(term.sum / term.count, theirs, **CLOSE)


def test_aggregation_over_microbatches_is_that_of_the_whole(rng: np.random.Generator) -> None:
    """verl needs to be told the global counts; without them its means of micro-batches are averaged. Ours add up."""
    data = Data(rng)
    term = reduced(data.per_token, data.lengths, ReductionConfig())
    cut = int(data.lengths[:4].sum())
    halves = [
        reduced(data.per_token[:cut], data.lengths[:4], ReductionConfig()),
        reduced(data.per_token[cut:], data.lengths[4:], ReductionConfig()),
    ]
    merged = sum(half.sum for half in halves) / sum(half.count for half in halves)
    torch.testing.assert_close(merged, term.sum / term.count)
    rows, mask = data.padded(data.per_token), data.mask
    told = [core.agg_loss(rows[s], mask[s], "token-mean", batch_num_tokens=mask.sum()) for s in (slice(4), slice(4, 9))]
    torch.testing.assert_close(sum(told), term.sum / term.count, **CLOSE)


def test_value_loss(rng: np.random.Generator) -> None:
    data = Data(rng)
    predicted, baseline, returns = data.values, data.values + 0.3 * data.other, data.per_token
    losses = value_losses(Critique(predicted, baseline, returns - baseline, returns), 0.2)
    theirs, _ = core.compute_value_loss(
        data.padded(predicted), data.padded(returns), data.padded(baseline), data.mask, cliprange_value=0.2
    )
    torch.testing.assert_close(losses.mean(), theirs, **CLOSE)


def test_abs_is_theirs(rng: np.random.Generator) -> None:
    data = Data(rng)
    theirs = core.kl_penalty_forward(data.values, data.other, "abs")
    torch.testing.assert_close(kl_estimate(data.values, data.other, "abs"), theirs)


def test_gpg(rng: np.random.Generator) -> None:
    data = Data(rng)
    theirs, _ = core.compute_gpg_outcome_advantage(data.outcome_rows, data.mask, data.index)
    scale = ours.gpg_scale(data.outcomes, data.sizes, count="nonzero")
    own = ours.group_advantages(data.outcomes, data.sizes, scale=False) * scale
    torch.testing.assert_close(data.over_tokens(own), data.flat(theirs), **CLOSE)
