"""PPO's objective for a linear policy with explicit gradients, and Adam.

Schulman et al. 2017, arXiv 1707.06347; the KL estimate is Schulman's ``(r - 1) - ln r``. ``B`` steps of a mini-batch,
``D`` of them with a decision, ``C`` columns of the policy, ``M`` modes; log-probabilities in nats, float64 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradwire.router.features import Floats
from gradwire.router.policy import LinearPolicy, Parameters
from gradwire.router.world import Integers


@dataclass(frozen=True)
class Objective:
    """``policy_loss + value_coef value_loss - entropy_coef entropy``.

    Attributes:
        clip_epsilon: Clip range of the ratio: ``1 ± clip_epsilon``.
        value_clip_epsilon: Clip range of the value: ``old value ± value_clip_epsilon``; None: no clipping.
        value_coef, entropy_coef: Weights.
    """

    clip_epsilon: float = 0.2
    value_clip_epsilon: float | None = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.01


@dataclass(frozen=True)
class MiniBatch:
    """Steps to learn from.

    Attributes:
        x: ``[B, C]``.
        old_values, returns: ``[B]``.
        decisions: ``[D]``, rows of the steps in which a mode was chosen.
        modes, old_logprobs, advantages: ``[D]``.
    """

    x: Floats
    old_values: Floats
    returns: Floats
    decisions: Integers
    modes: Integers
    old_logprobs: Floats
    advantages: Floats


def loss_and_gradients(
    policy: LinearPolicy, batch: MiniBatch, objective: Objective
) -> tuple[dict[str, float], Parameters]:
    """Compute the metrics of a mini-batch and the gradient of its loss by each parameter.

    Returns:
        ``loss``, ``policy_loss``, ``value_loss``, ``entropy``, ``approx_kl`` and ``clip_fraction``; and gradients of
        the parameters' shapes. Policy loss and entropy are means over the ``D`` decisions, the value loss over ``B``
        steps.
    """
    policy_figures, policy_weight, policy_bias = _policy_part(policy, batch, objective)
    value_loss, by_value = _value_part(policy, batch, objective)
    by_value *= objective.value_coef
    figures = policy_figures | {"value_loss": value_loss}
    figures["loss"] = (
        figures["policy_loss"] + objective.value_coef * value_loss - objective.entropy_coef * figures["entropy"]
    )
    return figures, {
        "policy_weight": policy_weight,
        "policy_bias": policy_bias,
        "value_weight": batch.x.T @ by_value,
        "value_bias": np.asarray(by_value.sum()),
    }


def _policy_part(
    policy: LinearPolicy, batch: MiniBatch, objective: Objective
) -> tuple[dict[str, float], Floats, Floats]:
    """Metrics of the policy, and the gradient of ``policy_loss - entropy_coef entropy`` by its weight and bias."""
    count = len(batch.decisions)
    if not count:  # a mini-batch with agents' steps only
        figures = dict.fromkeys(("policy_loss", "entropy", "approx_kl", "clip_fraction"), 0.0)
        shape = policy.parameters["policy_weight"].shape
        return figures, np.zeros(shape), np.zeros(shape[1])
    x, advantages, epsilon = batch.x[batch.decisions], batch.advantages, objective.clip_epsilon
    logprobs = policy.logprobs(x)
    probabilities, rows = np.exp(logprobs), np.arange(count)
    log_ratio = logprobs[rows, batch.modes] - batch.old_logprobs
    ratio = np.exp(log_ratio)
    entropies = -(probabilities * logprobs).sum(axis=1)
    gains = np.minimum(ratio * advantages, np.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages)
    figures = {
        "policy_loss": float(-gains.mean()),
        "entropy": float(entropies.mean()),
        "approx_kl": float((ratio - 1.0 - log_ratio).mean()),
        "clip_fraction": float((np.abs(ratio - 1.0) > epsilon).mean()),
    }
    # Where the clipped term is the smaller one it is constant. d log p_m / d logits = onehot(m) - p; dr = r d log p.
    counts = np.where(advantages >= 0, ratio <= 1 + epsilon, ratio >= 1 - epsilon)
    by_logprob = np.where(counts, -ratio * advantages, 0.0) / count
    by_logits = -by_logprob[:, None] * probabilities
    by_logits[rows, batch.modes] += by_logprob
    # dH / d logits = -p (log p + H)
    by_logits += objective.entropy_coef / count * probabilities * (logprobs + entropies[:, None])
    return figures, x.T @ by_logits, by_logits.sum(axis=0)


def _value_part(policy: LinearPolicy, batch: MiniBatch, objective: Objective) -> tuple[float, Floats]:
    """Half the mean squared error, the larger of the plain and clipped loss, and its gradient by each value ``[B]``."""
    errors = policy.values(batch.x) - batch.returns
    if objective.value_clip_epsilon is None:
        return float(0.5 * (errors**2).mean()), errors / len(errors)
    moved = errors + batch.returns - batch.old_values
    bound = objective.value_clip_epsilon
    clipped = batch.old_values + np.clip(moved, -bound, bound) - batch.returns
    worse = clipped**2 > errors**2  # true only if the clipped value is used, where the gradient is 0
    loss = float(0.5 * np.where(worse, clipped**2, errors**2).mean())
    return loss, np.where(worse, 0.0, errors) / len(errors)


class Adam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) on a policy's parameters, with gradient clipping.

    Args:
        policy: The policy; its parameters change in place.
        learning_rate: Step size.
        max_grad_norm: Gradient clipping norm.
        betas, eps: As in the paper.

    Attributes:
        learning_rate: May be changed between steps.
    """

    def __init__(
        self,
        policy: LinearPolicy,
        learning_rate: float,
        max_grad_norm: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._policy, self._bound, self._betas, self._eps = policy, max_grad_norm, betas, eps
        self.learning_rate = learning_rate
        self._mean = {name: np.zeros_like(array) for name, array in policy.parameters.items()}
        self._square = {name: np.zeros_like(array) for name, array in policy.parameters.items()}
        self.steps = 0

    def step(self, gradients: Parameters) -> float:
        """Update the parameters; return the gradient norm before clipping."""
        norm = float(np.sqrt(sum(float((each**2).sum()) for each in gradients.values())))
        scale = min(1.0, self._bound / (norm + 1e-12))
        self.steps += 1
        first, second = self._betas
        rate = self.learning_rate * np.sqrt(1.0 - second**self.steps) / (1.0 - first**self.steps)
        eps = self._eps * np.sqrt(1.0 - second**self.steps)
        for name, gradient in gradients.items():
            gradient = gradient * scale
            mean = self._mean[name] = first * self._mean[name] + (1.0 - first) * gradient
            square = self._square[name] = second * self._square[name] + (1.0 - second) * gradient**2
            self._policy.parameters[name] = self._policy.parameters[name] - rate * mean / (np.sqrt(square) + eps)
        return norm

    def state(self) -> dict[str, Floats]:
        """Return the state as arrays that :meth:`load` accepts, for a checkpoint."""
        kept = {f"mean.{name}": array for name, array in self._mean.items()}
        kept |= {f"square.{name}": array for name, array in self._square.items()}
        return kept | {"steps": np.array(self.steps, dtype=np.float64)}

    def load(self, state: Mapping[str, Floats]) -> None:
        """Restore a :meth:`state`."""
        self._mean = {name: state[f"mean.{name}"] for name in self._mean}
        self._square = {name: state[f"square.{name}"] for name in self._square}
        self.steps = int(state["steps"])
