"""The sampler's log-probabilities against the trainer's: how far they differ, and weights that correct for it.

A sampler computes the same policy with other kernels, and often with another precision. ``T`` scored tokens.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, segment_mean, segment_sum, spread
from gradwire_losses.kl import exp_minus_one, kl_estimate
from gradwire_losses.outputs import Max, Mean, Metric
from gradwire_losses.policy import probability_ratio
from gradwire_losses.registry import LossConfig


class SamplerConfig(LossConfig):
    """Arguments of a policy loss that can correct for the sampler, or leave out responses because of it."""

    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        None,
        description="weight the policy loss by the ratio of old_log_probs' to sampler_log_probs' probabilities, per "
        "token or per response, truncated to sampler_ratio_min ... sampler_ratio_max, or set to 0 outside",
    )
    sampler_ratio_max: float = Field(3.0, gt=0, description="for sampler_correction: the largest weight")
    sampler_ratio_min: float = Field(0.0, ge=0, description="for sampler_correction: the smallest weight")
    sampler_normalize: bool = Field(
        False,
        description="for sampler_correction: divide the weights by their mean over the batch's tokens, or over its "
        "responses if there is one for each",
    )
    sampler_rejection: Literal["seq_mean_k1", "seq_mean_k3"] | None = Field(
        None,
        description="leave out responses by the difference d of their tokens' old_log_probs and sampler_log_probs. "
        "seq_mean_k1: whose geometric mean of ratios, exp(mean d), is outside sampler_rejection_min ... _max; "
        "seq_mean_k3: whose mean of exp(d) - 1 - d exceeds sampler_rejection_max",
    )
    sampler_rejection_max: float | None = Field(
        None, gt=0, description="required with sampler_rejection: its bound; for seq_mean_k1 above 1, about 1.001"
    )
    sampler_rejection_min: float | None = Field(
        None, gt=0, description="for seq_mean_k1: the lower bound; 1 / sampler_rejection_max if None"
    )

    @model_validator(mode="after")
    def _bounds_go_with_rejection(self) -> Self:
        if (self.sampler_rejection is None) != (self.sampler_rejection_max is None):
            raise ValueError("sampler_rejection and sampler_rejection_max come together")
        if self.sampler_rejection_min is not None and self.sampler_rejection != "seq_mean_k1":
            raise ValueError("sampler_rejection_min goes with sampler_rejection seq_mean_k1")
        return self


SAMPLER_METRICS = {
    "sampler_kl": "mean KL per token from the sampler to the trainer, by k3 (nats): from sampler_log_probs to "
    "old_log_probs, or without sampler_log_probs from old_log_probs to this call, which is the same until the first "
    "step on a batch",
    "sampler_logprob_diff": "mean difference of a token's log-probability, the trainer's less the sampler's, of the "
    "policies of sampler_kl",
    "sampler_logprob_diff_max": "largest absolute difference of a token's log-probability, of the policies of "
    "sampler_kl",
}
SAMPLER_RATIO_METRIC = {"sampler_ratio_mean": "mean weight per token of sampler_correction; NaN without it"}


def sampler_metrics_of(field: str) -> dict[str, str]:
    """Descriptions for a loss without ``sampler_log_probs``, which compares this call with ``field``."""
    return {
        "sampler_kl": f"mean KL per token from the policy of {field} to the current one, by k3 (nats); until the first "
        "step on a batch, from the sampler to the trainer",
        **{name: SAMPLER_METRICS[name] for name in ("sampler_logprob_diff", "sampler_logprob_diff_max")},
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
        nothing = Mean(0.0, 0)
        return {"sampler_kl": nothing, "sampler_logprob_diff": nothing, "sampler_logprob_diff_max": Max(-math.inf)}
    return {
        "sampler_kl": Mean.of(kl_estimate(sampler, trainer, "k3")),
        "sampler_logprob_diff": Mean.of(trainer - sampler),
        "sampler_logprob_diff_max": Max.of((sampler - trainer).abs()),
    }


SAMPLER_WHOLE_BATCH = "the mean weight, with sampler_normalize"
"""For ``whole_batch``."""


def rejected_by_sampler(batch: Batch, config: SamplerConfig) -> Tensor:
    """``[S]`` bool, on the host: the responses whose log-probabilities differ too much between sampler and trainer.

    Li et al. 2025, "When Speed Kills Stability"; as in verl's rollout correction, ``d = old_log_probs -
    sampler_log_probs``, a rejected response leaves loss and mean.

    Raises:
        BatchError: The batch has not both log-probabilities.
    """
    fields, lengths = batch.host, batch.row_lengths
    for name in ("old_log_probs", "sampler_log_probs"):
        if name not in batch.fields:
            raise BatchError(
                f"sampler_rejection needs {name}: it compares old_log_probs with sampler_log_probs",
                field=name,
                rule="required with sampler_rejection",
            )
    difference = fields["old_log_probs"] - fields["sampler_log_probs"]
    largest = config.sampler_rejection_max
    assert largest is not None
    if config.sampler_rejection == "seq_mean_k3":
        return segment_mean(exp_minus_one(difference) - difference, lengths) > largest
    smallest = 1 / largest if config.sampler_rejection_min is None else config.sampler_rejection_min
    mean = segment_mean(difference, lengths)
    return (mean > math.log(largest)) | (mean < math.log(smallest))


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
        weights = weights.clamp(low, high)
    else:
        weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    if not config.sampler_normalize or not len(weights):
        return weights
    if level == "sequence":
        mean = segment_mean(weights, batch.row_lengths).sum() / int((batch.row_lengths > 0).sum())
    else:
        mean = weights.mean()
    return weights / mean.clamp(min=1e-8)


def sampler_ratio(weights: Tensor | None) -> Mean:
    """The mean weight; NaN without weights."""
    return Mean(0.0, 0) if weights is None else Mean.of(weights)
