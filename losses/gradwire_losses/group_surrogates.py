"""The ``surrogate`` losses of tokens in groups of responses.

``S`` responses, ``T`` scored tokens of all responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire_losses.batch import beside, segment_sum, spread
from gradwire_losses.group_config import GRPOConfig
from gradwire_losses.policy import (
    clipped_surrogate,
    geometric_surrogate,
    own_gradient_ratio,
    probability_ratio,
    sequence_log_ratio,
    soft_surrogate,
    weighted_surrogate,
)


def uncertain_tokens(entropy: Tensor, share: float) -> Tensor:
    """``[T]`` bool: the given share of the batch's tokens, those of highest entropy.

    Wang et al. 2025, Beyond the 80/20 Rule, arXiv 2506.01939.
    """
    if share == 1 or not len(entropy):
        return torch.ones_like(entropy, dtype=torch.bool)
    return entropy >= torch.quantile(entropy, 1 - share)


def token_ratios(logprobs: Tensor, old: Tensor, lengths: Tensor, config: GRPOConfig) -> Tensor:
    """``[T]``: the importance ratio of each token, by ``importance``."""
    if config.importance == "sequence":
        mean = sequence_log_ratio(logprobs, old, lengths)
        return probability_ratio(mean, torch.zeros_like(mean))
    if config.importance == "sequence_token":
        return own_gradient_ratio(logprobs, sequence_log_ratio(logprobs, old, lengths))
    if config.importance == "trajectory":
        whole = spread(segment_sum(logprobs - old, lengths), lengths)
        return probability_ratio(whole, torch.zeros_like(whole))
    return probability_ratio(logprobs, old)


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a surrogate, each ``[T]`` except ``lengths [S]``.

    Attributes:
        logprobs, old: Log-probabilities under the current policy and under the policy that wrote the batch.
        advantages: No gradient.
        uncertain: Bool, the tokens with a policy loss.
        sampler: Weights of the sampler correction, or None.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    lengths: Tensor
    uncertain: Tensor
    sampler: Tensor | None


def surrogate_losses(tokens: SurrogateInputs, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """``[T], [T] bool``: the loss of each token, 0 for tokens that are not uncertain, and whether a clip is active.

    GMPO's loss of a whole response is computed over its uncertain tokens.
    """
    losses, clipped = _token_losses(tokens, config)
    if config.surrogate != "gmpo":
        losses = torch.where(tokens.uncertain, losses, 0.0)
    if tokens.sampler is not None and config.surrogate != "vespo":  # whose ratio includes the sampler weights
        losses = losses * tokens.sampler
    return losses, clipped


def _token_losses(tokens: SurrogateInputs, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    logprobs, old, advantages, lengths = tokens.logprobs, tokens.old, tokens.advantages, tokens.lengths
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    low, high = config.clip_range
    match config.surrogate:
        case "gmpo":
            return geometric_surrogate(logprobs - old, advantages, lengths, low, high, tokens.uncertain)
        case "reinforce":
            return -advantages * logprobs, nothing
        case "vespo":
            return vespo_surrogate(logprobs, old, advantages, lengths, tokens.sampler, config), nothing
        case "dppo_tv" | "dppo_kl":
            measure: Literal["tv", "kl"] = "tv" if config.surrogate == "dppo_tv" else "kl"
            return trust_region_surrogate(logprobs, old, advantages, measure, low, high, config.ratio_max)
        case "topr":
            return tapered_surrogate(logprobs, old, advantages, lengths)
    ratio = token_ratios(logprobs, old, lengths, config)
    match config.surrogate:
        case "cispo":
            return weighted_surrogate(ratio, logprobs, advantages, config.ratio_min, config.ratio_max)
        case "sapo":
            return soft_surrogate(ratio, advantages, config.sapo_temperature_pos, config.sapo_temperature_neg), nothing
        case "kl_cov":
            penalised = _highest(covariance(logprobs, advantages), config.cov_share)
            penalty = torch.where(penalised, config.kl_cov_coef * (logprobs - old).abs(), 0.0)
            return -ratio * advantages + penalty, penalised
    losses, clipped = clipped_surrogate(ratio, advantages, 1 - low, 1 + high, config.dual_clip)
    if config.surrogate == "clip_cov":
        found = covariance(logprobs, advantages)
        among = (found > config.cov_min) & (found < config.cov_max) & ~clipped
        detached = _drawn(among, config.cov_share, config.cov_seed)
        return torch.where(detached, 0.0, losses), detached
    return losses, clipped


def tapered_surrogate(logprobs: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``[T], [T] bool``: ``-w A log p``, w without gradient: 1 where A >= 0, else the response's ratio, 1 at most.

    TOPR: what the policy has unlearned already is not pushed down further, and gains need no ratio (Le Roux et al.
    2025, Tapered Off-Policy REINFORCE, arXiv 2503.14286).

    Returns:
        The loss of each token, and whether its ratio is cut to 1."""
    whole = spread(segment_sum((logprobs - old).detach(), lengths), lengths)
    weight = torch.where(advantages >= 0, 1.0, whole.clamp(max=0.0).exp())
    return -weight * advantages * logprobs, (advantages < 0) & (whole > 0)


def vespo_surrogate(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    sampler: Tensor | None,
    config: GRPOConfig,
) -> Tensor:
    """``[T]``: ``-phi(w) A log p``, ``phi(w) = e^lambda w^k e^(-lambda w)`` without gradient, 1 where w is 1.

    w is the response's ratio; with ``sampler`` (``[T]`` weights) it is relative to the sampler's probabilities; k and
    lambda depend on the sign of A. VESPO 2026 (arXiv 2602.10693)."""
    log_ratio = (logprobs - old).detach().clamp(-20.0, 20.0)
    if sampler is not None:
        log_ratio = log_ratio + sampler.clamp(min=1e-8).log()
    log_w = spread(segment_sum(log_ratio, lengths), lengths).clamp(math.log(1e-8), 20.0)
    gains = advantages >= 0
    k = torch.where(gains, config.vespo_k_pos, config.vespo_k_neg)
    rate = torch.where(gains, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return -torch.exp(rate + k * log_w - rate * log_w.exp()) * advantages * logprobs


def trust_region_surrogate(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    measure: Literal["tv", "kl"],
    low: float,
    high: float,
    ratio_max: float,
) -> tuple[Tensor, Tensor]:
    """DPPO: ``-sg(min(r, ratio_max)) A log p``, 0 where the token's probability has moved too far in the direction of
    A.

    The distance is the difference of the probabilities (``tv``), or the KL between the two-point distributions of this
    token and any other (``kl``), against ``high`` where A > 0 and ``low`` elsewhere. Rethinking the Trust Region in LLM
    Reinforcement Learning 2026 (arXiv 2602.04879).

    Returns:
        The loss of each token, and whether it is 0 for this reason (bool)."""
    now, before = logprobs.detach().exp(), old.exp()
    if measure == "tv":
        outside = torch.where(advantages > 0, now - before > high, before - now > low)
    else:
        rest = torch.log((1 - before + 1e-8) / (1 - now + 1e-8))
        moved = before * (old - logprobs.detach()) + (1 - before) * rest
        outside = torch.where(advantages > 0, (moved > high) & (now > before), (moved > low) & (now < before))
    weight = probability_ratio(logprobs.detach(), old).clamp(max=ratio_max)
    return torch.where(outside, 0.0, -weight * advantages * logprobs), outside


def covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """``[T]``: each token's part in the covariance of log-probability and advantage over the batch; no gradient.

    Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning (arXiv 2505.22617).
    """
    if not len(logprobs):
        return torch.zeros_like(advantages)
    held = logprobs.detach()
    return (advantages - advantages.mean()) * (held - held.mean())


def _highest(values: Tensor, share: float) -> Tensor:
    """``[T]`` bool: the given share of the highest entries, at least one."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    if len(values):
        chosen[values.topk(max(1, int(len(values) * share))).indices] = True
    return chosen


def _drawn(among: Tensor, share: float, seed: int) -> Tensor:
    """``[T]`` bool: entries drawn from those of ``among``; their number is the given share of all entries, at least
    one."""
    numbers = torch.rand(len(among), generator=torch.Generator().manual_seed(seed))
    ranks = torch.where(among, beside(numbers, among), torch.inf).argsort().argsort()
    return among & (ranks < max(1, int(len(among) * share)))
