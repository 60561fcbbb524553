"""Losses in Tinker's convention: plain sums unless ``reduction`` says otherwise, and nothing is shifted.

Entry t of every field belongs to the prediction made after reading ``input_ids[..t]``: ``target_tokens`` is the target
there, ``weights`` or ``advantages`` its weight. A sum is not averaged: the calls of one accumulation add up; to get a
mean, divide the weights. ``importance_sampling`` accepts this form too.

A prompt's predictions are masked, or have advantage 0 and log-probability 0, because they were not sampled: such
entries are placeholders, which add nothing to a sum and are excluded from means, metrics and a row's ratio.

``T`` predictions, ``K`` candidates at each, ``S`` rows. Names, fields and defaults: Tinker's documentation, "Losses".
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_sum, select, spread
from gradwire_losses.fields import INPUT_IDS, ROW_TOKENS, row_field
from gradwire_losses.kl import kl_estimate
from gradwire_losses.outputs import LossOutput, Max, Mean, Metric, Sum, Term
from gradwire_losses.policy import clipped_surrogate, own_gradient_ratio, probability_ratio, weighted_surrogate
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.registry import FieldSpec, ScoreName, TemperatureConfig, register_loss
from gradwire_losses.sampler import sampler_metrics, sampler_metrics_of

CANDIDATES = "[rows, tokens, candidates]"

TARGET_TOKENS = FieldSpec(
    "target_tokens",
    "int",
    ROW_TOKENS,
    "The token predicted after each token of input_ids.",
    required=True,
    aligned_with="input_ids",
    ids=True,
)
MASK = FieldSpec("mask", "bool", ROW_TOKENS, "1 for predictions that count; all by default.", aligned_with="input_ids")
LOGPROBS = row_field(
    "logprobs", ROW_TOKENS, "Log-probability of each target under the policy that wrote it.", required=True
)
ADVANTAGES = row_field("advantages", ROW_TOKENS, "Advantage of each target; 0 for a prompt's.", required=True)
POLICY_FIELDS = (INPUT_IDS, TARGET_TOKENS, LOGPROBS, ADVANTAGES, MASK)
CLIP_FIELDS = (
    row_field("clip_low_threshold", ROW_TOKENS, "Lower bound of each prediction's ratio, in place of the argument's."),
    row_field("clip_high_threshold", ROW_TOKENS, "Upper bound of each prediction's ratio, in place of the argument's."),
)
POLICY_METRICS = {
    "loss:sum": "the sum over predictions, whatever reduction says",
    "ratio_mean": "mean over predictions of the policy's probability over that of logprobs",
    "ratio_max": "largest ratio",
    "clip_fraction": "share of predictions whose loss a bound of the ratio decides; 0 without bounds",
    "approx_kl": "mean KL per prediction from the policy of logprobs to the current one, by k3 (nats)",
    **sampler_metrics_of("logprobs"),
}


class SumConfig(TemperatureConfig, ReductionConfig):
    """Arguments of every loss of this file."""

    reduction: Reduction = Field("sum", description="the default is Tinker's: a sum. Means are over predictions")


class CrossEntropyConfig(SumConfig):
    """Arguments of ``cross_entropy``; a mean is over the predictions with a target of non-zero weight."""


def _cross_entropy_scores(config: CrossEntropyConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"candidate_logprobs"} if "candidates" in present else {"logprobs"})


@register_loss(
    "cross_entropy",
    config=CrossEntropyConfig,
    fields=(
        INPUT_IDS,
        FieldSpec(
            "target_tokens",
            "int",
            (*ROW_TOKENS, CANDIDATES),
            "The token predicted after each token of input_ids, or several.",
            required=True,
            aligned_with="input_ids",
            ids=True,
        ),
        row_field("weights", (*ROW_TOKENS, CANDIDATES), "Weight of each target; 0 for a prompt's.", required=True),
        MASK,
    ),
    scores=_cross_entropy_scores,
    metrics={
        "loss:sum": POLICY_METRICS["loss:sum"],
        "nll": "weighted mean negative log-likelihood per target (nats)",
        "num_tokens": "number of targets with non-zero weight",
    },
    reference="Tinker's documentation, cross_entropy",
    formula="-sum_t w_t log p(y_t | x_<=t), or -sum_t sum_k w_tk log p(y_tk | x_<=t)",
    streams=True,
)
def cross_entropy(batch: Batch, scores: Scores, config: CrossEntropyConfig) -> LossOutput:
    """Weighted sum of the negative log-likelihoods of the targets, one or several at each position.

    Several candidates weighted by a teacher's probabilities distil the teacher.

    Raises:
        BatchError: ``weights`` do not have the shape of ``target_tokens``.
    """
    logprobs = scores.candidate_logprobs if "candidates" in batch.fields else scores.logprobs
    weights = batch["weights"]
    if weights.shape != logprobs.shape:
        want, have = (
            f"{shape[1]} a token" if len(shape) > 1 else "one per token" for shape in (logprobs.shape, weights.shape)
        )
        raise BatchError(
            f"weights has {have} but target_tokens has {want}", field="weights", rule="the shape of target_tokens"
        )
    counted = batch.host["weights"] != 0
    # A target of weight 0 may have probability 0 as well.
    losses = torch.where(beside(counted, logprobs), -weights * logprobs, 0.0)
    if losses.ndim == 2:
        losses, there = losses.sum(dim=1), counted.any(dim=1)
    else:
        there = counted
    total = losses.detach().double().sum()
    return LossOutput(
        {"cross_entropy": _reduced_over(there, losses, batch, config)},
        {
            "loss:sum": Sum(total),
            "nll": Mean(total, weights.double().sum()),
            "num_tokens": Sum(int(counted.sum())),
        },
    )


def _reduced_over(there: Tensor, losses: Tensor, batch: Batch, config: ReductionConfig) -> Term:
    """``[T] bool on the host, [T]`` -> the term over the selected predictions."""
    return reduced(select(losses, there), segment_sum(there.long(), batch.row_lengths), config)


def written(batch: Batch) -> Tensor:
    """``[T]`` bool, on the host: which predictions were sampled and are not a prompt's placeholders."""
    return (batch.host["advantages"] != 0) | (batch.host["logprobs"] != 0)


def _policy_output(
    batch: Batch, scores: Scores, config: SumConfig, losses: Tensor, ratio: Tensor, clipped: Tensor
) -> LossOutput:
    """The term and the metrics of this file's policy losses. ``losses``, ``ratio``, ``clipped``: ``[T]``."""
    there = written(batch)
    logprobs, old = select(scores.logprobs, there), select(batch["logprobs"], there)
    metrics: dict[str, Metric] = {
        "loss:sum": Sum(select(losses, there).detach().double().sum()),
        "ratio_mean": Mean.of(select(ratio, there)),
        "ratio_max": Max.of(select(ratio, there)),
        "clip_fraction": Mean.of(select(clipped, there)),
        "approx_kl": Mean.of(kl_estimate(old, logprobs, "k3")),
        **sampler_metrics(batch, logprobs, old),
    }
    return LossOutput({"policy": _reduced_over(there, losses, batch, config)}, metrics)


class ClipConfig(SumConfig):
    """Arguments of ``ppo``."""

    clip_low_threshold: float = Field(
        0.8, ge=0, description="lower bound of the ratio itself (not of its distance from 1)"
    )
    clip_high_threshold: float = Field(1.2, gt=0, description="upper bound of the ratio itself")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_low_threshold > self.clip_high_threshold:
            raise ValueError("clip_low_threshold is above clip_high_threshold")
        return self


@register_loss(
    "ppo",
    config=ClipConfig,
    fields=(*POLICY_FIELDS, *CLIP_FIELDS),
    scores=("logprobs",),
    metrics=POLICY_METRICS,
    reference="Schulman et al. 2017 (arXiv 1707.06347); Tinker's documentation, ppo",
    formula="-sum_t min(r_t A_t, clip(r_t, low, high) A_t), r_t = exp(log p_t - logprobs_t)",
    streams=True,
)
def ppo(batch: Batch, scores: Scores, config: ClipConfig) -> LossOutput:
    """PPO's clipped surrogate, summed over predictions. With a critic and all options: ``enhanced_ppo``."""
    old = batch["logprobs"]
    ratio = probability_ratio(scores.logprobs, old)
    losses, clipped = clipped_surrogate(ratio, batch["advantages"], *_clip_bounds(batch, config, ratio))
    return _policy_output(batch, scores, config, losses, ratio, clipped)


def _clip_bounds(batch: Batch, config: ClipConfig, ratio: Tensor) -> tuple[float, float] | tuple[Tensor, Tensor]:
    """The bounds of each prediction's ratio: those of the batch, and the arguments' where it has none."""
    low, high = batch.get("clip_low_threshold"), batch.get("clip_high_threshold")
    if low is None and high is None:
        return config.clip_low_threshold, config.clip_high_threshold
    low = torch.full_like(ratio, config.clip_low_threshold) if low is None else low
    high = torch.full_like(ratio, config.clip_high_threshold) if high is None else high
    return low.to(ratio.dtype), high.to(ratio.dtype)


class CISPOConfig(ClipConfig):
    """Arguments of ``cispo``."""

    clip_low_threshold: float = Field(0.0, ge=0, description="lower bound of the weight; 0 for an upper bound only")
    clip_high_threshold: float = Field(4.0, gt=0, description="upper bound of the weight")


@register_loss(
    "cispo",
    config=CISPOConfig,
    fields=(*POLICY_FIELDS, *CLIP_FIELDS),
    scores=("logprobs",),
    metrics=POLICY_METRICS,
    reference="MiniMax-M1 2025 (arXiv 2506.13585); Tinker's documentation, cispo",
    formula="-sum_t sg(clip(r_t, low, high)) A_t log p_t",
    streams=True,
)
def cispo(batch: Batch, scores: Scores, config: CISPOConfig) -> LossOutput:
    """REINFORCE weighted by the clipped ratio, which has no gradient, so that no token is left out. A sum.

    Over groups of responses with their rewards: ``group_cispo``.
    """
    old = batch["logprobs"]
    ratio = probability_ratio(scores.logprobs, old)
    bounds = _clip_bounds(batch, config, ratio)
    losses, clipped = weighted_surrogate(ratio, scores.logprobs, batch["advantages"], *bounds)
    return _policy_output(batch, scores, config, losses, ratio, clipped)


class DROConfig(SumConfig):
    """Arguments of ``dro``."""

    beta: float = Field(
        0.05, gt=0, description="weight of the squared log-ratio, which limits the change of the policy"
    )


@register_loss(
    "dro",
    config=DROConfig,
    fields=POLICY_FIELDS,
    scores=("logprobs",),
    metrics=POLICY_METRICS,
    reference="Richemond et al. 2024, Offline Regularised RL (arXiv 2405.19107); Tinker's documentation, dro",
    formula="-sum_t [A_t log p_t - beta/2 (log p_t - logprobs_t)^2]",
    streams=True,
)
def dro(batch: Batch, scores: Scores, config: DROConfig) -> LossOutput:
    """Direct reward optimisation: REINFORCE with a quadratic penalty on the log-ratio, for off-policy data. A sum."""
    old = batch["logprobs"]
    log_ratio = scores.logprobs - old
    losses = -(batch["advantages"] * scores.logprobs - 0.5 * config.beta * log_ratio.square())
    ratio = probability_ratio(scores.logprobs, old)
    return _policy_output(batch, scores, config, losses, ratio, torch.zeros_like(ratio))


class GSPOConfig(ClipConfig):
    """Arguments of ``gspo``."""

    clip_low_threshold: float = Field(1 - 3e-4, ge=0, description="lower bound of a row's ratio")
    clip_high_threshold: float = Field(1 + 4e-4, gt=0, description="upper bound of a row's ratio")


@register_loss(
    "gspo",
    config=GSPOConfig,
    fields=(
        *POLICY_FIELDS,
        *CLIP_FIELDS,
        FieldSpec(
            "sequence_ratio_mask",
            "bool",
            ROW_TOKENS,
            "1 for predictions that are part of the row's ratio; by default all but a prompt's placeholders.",
            aligned_with="input_ids",
        ),
    ),
    scores=("logprobs",),
    metrics=POLICY_METRICS
    | {
        "ratio_mean": "mean over predictions of their row's ratio, the geometric mean of its predictions' ratios",
        "ratio_max": "largest ratio of a row",
    },
    reference="Zheng et al. 2025, GSPO-token (arXiv 2507.18071, whose clip range the defaults are); "
    "Tinker's documentation, gspo",
    formula="-sum_t min(s_t A_t, clip(s_t, low, high) A_t), s_t = sg(exp(mean_M log r)) p_t / sg(p_t)",
    streams=True,
)
def gspo(batch: Batch, scores: Scores, config: GSPOConfig) -> LossOutput:
    """PPO's surrogate with one ratio per row, the geometric mean of its predictions' ratios. A sum over predictions.

    Each prediction has the row's ratio and its own gradient (GSPO-token), so advantages may differ within a row. Over
    groups of responses with their rewards: ``group_gspo`` and ``gspo_token``.
    """
    old, lengths = batch["logprobs"], batch.row_lengths
    log_ratios = scores.logprobs.detach() - old
    mask = batch.get("sequence_ratio_mask")
    counted = (beside(written(batch), old) if mask is None else mask).to(log_ratios.dtype)
    mean = segment_sum(log_ratios * counted, lengths) / segment_sum(counted, lengths).clamp(min=1)
    ratio = own_gradient_ratio(scores.logprobs, spread(mean, lengths))
    losses, clipped = clipped_surrogate(ratio, batch["advantages"], *_clip_bounds(batch, config, ratio))
    return _policy_output(batch, scores, config, losses, ratio, clipped)
