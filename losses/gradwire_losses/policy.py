"""Surrogates of the policy gradient, of each token or sequence: what PPO and its kin have in common.

``ratio`` is the probability of a token under the policy over that under the policy that wrote it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire_losses.kl import exp_minus_one


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """``exp(logprobs - old_logprobs)``, linear in the difference beyond 20 nats: finite, and with a gradient."""
    return 1 + exp_minus_one(logprobs - old_logprobs)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate ``max(-r A, -clip(r, low, high) A)`` (Schulman et al. 2017, arXiv 1707.06347).

    Args:
        ratio: any shape.
        advantages: the same shape; no gradient.
        low, high: bounds of the ratio, around 1.
        dual_clip: where A < 0, the loss is at most ``-dual_clip A`` (Ye et al. 2020, arXiv 1912.09729).

    Returns:
        The loss of each entry, and whether a clip is what gave it (bool).
    """
    free, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    loss, active = torch.maximum(free, clipped), clipped > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss, active = torch.where(beyond, ceiling, loss), active | beyond
    return loss, active
