"""PPO's objective and its gradients, against torch's autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradwire.router import FeatureSpace, LinearPolicy
from gradwire.router.ppo import Adam, MiniBatch, Objective, loss_and_gradients

STEPS, FEATURES, MODES = 60, 5, 4


def some_batch(seed: int, decisions: int = 25) -> tuple[LinearPolicy, MiniBatch]:
    """Ratios on both sides of the clip, advantages of both signs, values in and out of their clip."""
    rng = np.random.default_rng(seed)
    space = FeatureSpace(tuple(f"x{column}" for column in range(FEATURES)))
    shapes = {"policy_weight": (FEATURES, MODES), "policy_bias": MODES, "value_weight": FEATURES, "value_bias": ()}
    policy = LinearPolicy(
        space, [f"m{mode}" for mode in range(MODES)], {name: rng.normal(size=shape) for name, shape in shapes.items()}
    )
    x, rows = rng.normal(size=(STEPS, FEATURES)), np.sort(rng.permutation(STEPS)[:decisions])
    modes = rng.integers(MODES, size=decisions)
    now = policy.logprobs(x[rows])[np.arange(decisions), modes]
    batch = MiniBatch(
        x,
        policy.values(x) + rng.normal(scale=0.5, size=STEPS),
        rng.normal(size=STEPS),
        rows,
        modes,
        now + rng.normal(scale=0.4, size=decisions),
        rng.normal(size=decisions),
    )
    return policy, batch


def reference(policy: LinearPolicy, batch: MiniBatch, objective: Objective) -> tuple[float, dict[str, np.ndarray]]:
    """The loss in torch, and its gradients by autograd."""
    given = {name: torch.tensor(array, requires_grad=True) for name, array in policy.parameters.items()}
    x, advantages = torch.tensor(batch.x), torch.tensor(batch.advantages)
    seen = x[torch.tensor(batch.decisions)]
    chosen = torch.distributions.Categorical(logits=seen @ given["policy_weight"] + given["policy_bias"])
    ratio = (chosen.log_prob(torch.tensor(batch.modes)) - torch.tensor(batch.old_logprobs)).exp()
    epsilon = objective.clip_epsilon
    policy_loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages).mean()
    values, old, returns = x @ given["value_weight"] + given["value_bias"], batch.old_values, batch.returns
    squares = (values - torch.tensor(returns)) ** 2
    if objective.value_clip_epsilon is not None:
        bound = objective.value_clip_epsilon
        clipped = torch.tensor(old) + (values - torch.tensor(old)).clamp(-bound, bound)
        squares = torch.maximum(squares, (clipped - torch.tensor(returns)) ** 2)
    value_loss = 0.5 * squares.mean()
    loss = policy_loss + objective.value_coef * value_loss - objective.entropy_coef * chosen.entropy().mean()
    loss.backward()
    return loss.item(), {name: np.asarray(each.grad) for name, each in given.items()}


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_autograds(seed: int, entropy_coef: float, value_clip: float | None) -> None:
    policy, batch = some_batch(seed)
    objective = Objective(0.2, value_clip, 0.7, entropy_coef)
    figures, gradients = loss_and_gradients(policy, batch, objective)
    loss, expected = reference(policy, batch, objective)
    assert figures["loss"] == pytest.approx(loss, abs=1e-12)
    assert 0 < figures["clip_fraction"] < 1
    for name, gradient in gradients.items():
        assert gradient == pytest.approx(expected[name], abs=1e-12), name


def test_steps_without_a_decision_move_the_value_alone() -> None:
    policy, batch = some_batch(0, decisions=0)
    figures, gradients = loss_and_gradients(policy, batch, Objective())
    assert (gradients["policy_weight"] == 0).all()
    assert (gradients["value_weight"] != 0).all()
    assert figures["policy_loss"] == figures["entropy"] == 0


def test_adam_is_torchs_with_its_norm_bounded() -> None:
    policy, _ = some_batch(1)
    theirs = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in policy.parameters.items()}
    optimizer, ours = torch.optim.Adam(theirs.values(), lr=0.05), Adam(policy, 0.05, max_grad_norm=1.0)
    rng = np.random.default_rng(0)
    for scale in (0.01, 5.0, 0.3, 2.0):
        gradients = {name: rng.normal(scale=scale, size=each.shape) for name, each in policy.parameters.items()}
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(np.asarray(gradients[name]))
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        optimizer.step()
        assert ours.step({name: np.asarray(each) for name, each in gradients.items()}) == pytest.approx(float(norm))
    for name, parameter in theirs.items():
        assert policy.parameters[name] == pytest.approx(parameter.detach().numpy(), abs=1e-6)
