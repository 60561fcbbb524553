"""Estimators of KL(policy || reference) from log-probabilities of tokens that the policy wrote.

``d = logprobs - ref_logprobs`` in nats, any shape. See Schulman 2020, "Approximating KL divergence"
(http://joschu.net/blog/kl-approx.html). As a loss term, only the gradients of k2 and k3 are useful: that of k1 is zero
in expectation, whatever the reference; that of k2 is the KL's own on the policy's samples. So "k1+" and "k3+" have the
value of k1 and k3 and the gradient of k2 (verl)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire_losses.outputs import Mean

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "abs"]
KL_ESTIMATORS = (
    "estimator of the KL per token, with d = log p - log reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d, "
    "abs is |d|; "
    "k1+ and k3+ have the value of k1 and k3 and the gradient of k2, which is the KL's own"
)
LINEAR_BEYOND = 20.0


def exp_minus_one(x: Tensor) -> Tensor:
    """``exp(x) - 1``, continued along its tangent beyond 20, so that distant policies give large numbers, not inf."""
    bounded = x.clamp(max=LINEAR_BEYOND)
    grown = torch.expm1(bounded)
    return grown + (grown.detach() + 1) * (x - bounded)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL estimate of each token: k1, d; k2, d^2 / 2; k3, exp(-d) - 1 + d (unbiased like k1, never below 0); abs,
    |d|."""
    difference = logprobs - ref_logprobs
    if estimator in ("k1+", "k3+"):
        k2 = 0.5 * difference.square()
        return kl_estimate(logprobs, ref_logprobs, "k1" if estimator == "k1+" else "k3").detach() + (k2 - k2.detach())
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    return exp_minus_one(-difference) + difference


@dataclass(frozen=True)
class AdaptiveKL:
    """The next KL coefficient, a metric: ``beta (1 + clip(kl / target - 1, -0.2, 0.2) rows / horizon)``.

    Ziegler et al. 2019, arXiv 1909.08593, where ``kl`` is the mean KL per token; ``beta`` itself without a target."""

    beta: float
    target: float | None
    horizon: float
    kl: Mean
    rows: int

    def merge(self, other: AdaptiveKL) -> AdaptiveKL:
        return AdaptiveKL(self.beta, self.target, self.horizon, self.kl.merge(other.kl), self.rows + other.rows)

    def value(self) -> float:
        if self.target is None or not self.kl.count:
            return self.beta
        error = min(max(self.kl.value() / self.target - 1, -0.2), 0.2)
        return self.beta * (1 + error * self.rows / self.horizon)
