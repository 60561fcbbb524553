"""The sampler's log-probabilities against the trainer's: how far they differ, and weights that correct for it.

A sampler computes the same policy with other kernels, and often with another precision. ``T`` scored tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, segment_sum, spread
from gradwire_losses.kl import kl_estimate
from gradwire_losses.outputs import Max, Mean, Metric
from gradwire_losses.policy import probability_ratio
from gradwire_losses.registry import LossConfig


class SamplerConfig(LossConfig):
    """Arguments of a policy loss that can correct for the sampler."""

    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        None,
        description="weight the policy loss by the ratio of old_log_probs' to sampler_log_probs' probabilities, per "
        "token or per response, truncated to sampler_ratio_min ... sampler_ratio_max, or set to 0 outside",
    )
    sampler_ratio_max: float = Field(3.0, gt=0, description="for sampler_correction: the largest weight")
    sampler_ratio_min: float = Field(0.0, ge=0, description="for sampler_correction: the smallest weight")


SAMPLER_METRICS = {
    "sampler_kl": "mean KL per token from the sampler to the trainer, by k3 (nats): from sampler_log_probs to "
    "old_log_probs, or without sampler_log_probs from old_log_probs to this call, which is the same until the first "
    "step on a batch",
    "sampler_logprob_diff_max": "largest difference of a token's log-probability between these two",
}
SAMPLER_RATIO_METRIC = {"sampler_ratio_mean": "mean weight per token of sampler_correction; NaN without it"}


def sampler_metrics_of(field: str) -> dict[str, str]:
    """Descriptions for a loss without ``sampler_log_probs``, which compares this call with ``field``."""
    return {
        "sampler_kl": f"mean KL per token from the policy of {field} to the current one, by k3 (nats); NaN without. "
        "Until the first step on a batch: from the sampler to the trainer",
        "sampler_logprob_diff_max": "largest difference of a token's log-probability between these two",
    }


def sampler_metrics(batch: Batch, logprobs: Tensor, old: Tensor | None) -> dict[str, Metric]:
    """The figures of :data:`SAMPLER_METRICS`; NaN if the batch has no log-probabilities to compare.

    Args:
        logprobs: ``[T]``, of this call.
        old: ``[T]``, those of the batch's policy as the batch gives them; None if it does not.
    """
    sampler, trainer = batch.get("sampler_log_probs"), logprobs.detach() if old is None else old
    if sampler is None:
        sampler, trainer = old, logprobs.detach()
    if sampler is None:
        return {"sampler_kl": Mean(0.0, 0), "sampler_logprob_diff_max": Max(-math.inf)}
    return {
        "sampler_kl": Mean.of(kl_estimate(sampler, trainer, "k3")),
        "sampler_logprob_diff_max": Max.of((sampler - trainer).abs()),
    }


def sampler_weights(batch: Batch, old: Tensor, config: SamplerConfig) -> Tensor | None:
    """``[T]``: truncated or masked importance weights between the trainer's and the sampler's log-probabilities.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    if config.sampler_correction is None:
        return None
    sampler = batch.get("sampler_log_probs")
    if sampler is None:
        raise BatchError(
            "sampler_correction needs sampler_log_probs, the log-probabilities that the sampler returned with its "
            "tokens",
            field="sampler_log_probs",
            rule="required with sampler_correction",
        )
    level, action = config.sampler_correction.split("_")
    difference = old - sampler
    if level == "sequence":
        difference = spread(segment_sum(difference, batch.row_lengths), batch.row_lengths)
    weights = probability_ratio(difference, torch.zeros_like(difference))
    low, high = config.sampler_ratio_min, config.sampler_ratio_max
    if action == "truncate":
        return weights.clamp(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def sampler_ratio(weights: Tensor | None) -> Mean:
    """The mean weight; NaN without weights."""
    return Mean(0.0, 0) if weights is None else Mean.of(weights)
