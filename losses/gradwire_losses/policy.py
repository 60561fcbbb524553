"""Surrogates of the policy gradient per token or sequence, shared by PPO and its variants.

``ratio`` is a token's probability under the policy divided by that under the policy that wrote it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire_losses.batch import segment_mean, segment_sum, spread
from gradwire_losses.kl import exp_minus_one


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """``exp(logprobs - old_logprobs)``, linear in the difference beyond 20 nats: finite, with a non-zero gradient."""
    return 1 + exp_minus_one(logprobs - old_logprobs)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, row_lengths: Tensor) -> Tensor:
    """``[T], [T], [S] -> [T]``: mean log-ratio of each token's sequence (Zheng et al. 2025, arXiv 2507.18071)."""
    return spread(segment_mean(logprobs - old_logprobs, row_lengths), row_lengths)


def own_gradient_ratio(logprobs: Tensor, log_ratio: Tensor) -> Tensor:
    """GSPO-token's ratio: the value ``exp(log_ratio)``, with the gradient of the token's own log-probability."""
    return probability_ratio(logprobs, (logprobs - log_ratio).detach())


def weighted_surrogate(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """CISPO: ``-sg(clip(r, low, high)) A log p`` (MiniMax-M1 2025, arXiv 2506.13585), and where the clip is active.

    The bounds are two numbers, or two tensors of the ratio's shape."""
    weight = _within(ratio.detach(), low, high)
    return -weight * advantages * logprobs, weight != ratio.detach()


def _within(ratio: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        return ratio.clamp(low, high)
    assert not isinstance(low, Tensor) and not isinstance(high, Tensor), "bounds are two numbers or two tensors"
    return ratio.clamp(low, high)


def soft_surrogate(ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    """SAPO: ``-4/tau sigmoid(tau (r - 1)) A``, tau depends on the sign of A (Gao et al. 2025, arXiv 2511.20347)."""
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


def geometric_surrogate(
    log_ratio: Tensor, advantages: Tensor, row_lengths: Tensor, low: float, high: float, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """GMPO: ``-exp(mean_t clipped log r_t) A`` of each token's sequence (Zhao et al. 2025, arXiv 2507.20673).

    A log-ratio is clipped to ``[-low, high]`` only on the side where clipping lowers the objective: from above where A
    > 0, from below where A < 0. The mean is over the tokens ``counted [T]`` (bool).

    Returns:
        The loss of each token's sequence, and where the clip is active.
    """
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    total = segment_sum(torch.where(counted, clipped, 0.0), row_lengths)
    mean = spread(total / segment_sum(counted.to(total.dtype), row_lengths).clamp(min=1), row_lengths)
    return -(1 + exp_minus_one(mean)) * advantages, clipped != log_ratio


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate ``max(-r A, -clip(r, low, high) A)`` (Schulman et al. 2017, arXiv 1707.06347).

    Args:
        ratio: Any shape.
        advantages: The same shape; no gradient.
        low, high: Bounds of the ratio, around 1: two numbers, or two tensors of the same shape.
        dual_clip: Where A < 0, the loss is at most ``-dual_clip A`` (Ye et al. 2020, arXiv 1912.09729). It is also the
            delta of two-sided clipping (INTELLECT-2 2025, arXiv 2505.07291).

    Returns:
        The loss of each entry, and whether a clip determines it (bool).
    """
    free, clipped = -ratio * advantages, -_within(ratio, low, high) * advantages
    loss, active = torch.maximum(free, clipped), clipped > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss, active = torch.where(beyond, ceiling, loss), active | beyond
    return loss, active
