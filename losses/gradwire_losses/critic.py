"""The critic of a policy gradient: values, advantages and returns, and the value loss.

``T`` scored tokens, ``S`` sequences.

The critic is one of:

* The server's value head, if the run has one (``create_run(..., head="value")``): the value loss trains it.
* The batch's ``values``, if the run has no head: constants, so the value loss is reported and trains nothing.

The values for estimating advantages, always without gradient, are the batch's ``old_values``, else its ``values``, else
the head's of the current call. ``clip_value_loss`` keeps the head close to the same values; with the head's own values
of the current call there is nothing to clip. So to take several steps on one batch, compute the values with ``forward``
before the first step and pass them as ``old_values``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from gradwire_losses.advantages import at_last_token, gae, whiten
from gradwire_losses.batch import Batch, Scores, segment_sum, select
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, ROW_TOKENS, ROWS_OR_TOKENS, row_field
from gradwire_losses.outputs import ExplainedVariance, LossOutput, Mean, Metric, Term
from gradwire_losses.reduction import ReductionConfig, reduced
from gradwire_losses.registry import register_loss


class AdvantageConfig(ReductionConfig):
    """Arguments for the estimation of advantages and the training of the critic."""

    whiten_rewards: bool = Field(
        False, description="scale the batch's rewards (minus the KL penalty) to variance 1, keeping their mean"
    )
    use_gae: bool = Field(True, description="False: advantages are discounted returns minus values (gae_lambda 1)")
    gamma: float = Field(0.99, ge=0, le=1, description="discount per token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="trade-off between bias and variance of the advantages")
    clip_value_loss: bool = Field(True, description="keep the critic within value_clip_epsilon of old_values")
    value_clip_epsilon: float | None = Field(None, gt=0, description="clip range of the values; clip_epsilon if None")


@dataclass(frozen=True)
class Critique:
    """The critic's output for a batch.

    Attributes:
        predicted: ``[T]``, values of the trained critic; differentiable if it is the server's head.
        baseline: ``[T]``, the values used to estimate advantages.
        advantages, returns: ``[T]``; no gradient.
    """

    predicted: Tensor
    baseline: Tensor
    advantages: Tensor
    returns: Tensor


def criticise(batch: Batch, scores: Scores, rewards: Tensor, config: AdvantageConfig) -> Critique:
    """Compute values, advantages and returns; ``rewards [T]``."""
    if config.whiten_rewards:
        rewards = whiten(rewards, shift_mean=False)
    predicted = scores.values if "values" in scores else batch["values"]
    baseline = batch.get("old_values")
    if baseline is None:
        baseline = batch.get("values")
    if baseline is None:
        baseline = predicted.detach()
    advantages, returns = gae(
        rewards,
        baseline,
        batch.row_lengths,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda if config.use_gae else 1.0,
        bootstrap_values=batch.get("bootstrap_values"),
    )
    return Critique(predicted, baseline, advantages, returns)


def value_losses(critique: Critique, clip_epsilon: float | None) -> Tensor:
    """``[T]``: ``1/2 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2)``; only the first term without a
    clip."""
    error = (critique.predicted - critique.returns).square()
    if clip_epsilon is not None:
        moved = (critique.predicted - critique.baseline).clamp(-clip_epsilon, clip_epsilon)
        error = torch.maximum(error, (critique.baseline + moved - critique.returns).square())
    return 0.5 * error


def token_rewards(batch: Batch) -> Tensor:
    """``[T]``: the batch's rewards; a row's reward goes to its last scored token."""
    rewards = batch["rewards"]
    return at_last_token(rewards, batch.row_lengths) if batch.levels["rewards"] == "sequence" else rewards


def reward_mean(batch: Batch) -> Mean:
    """Mean over rows with a scored token of the sum of rewards; NaN without rewards."""
    if "rewards" not in batch.fields:
        return Mean(0.0, 0)
    return Mean.of(select(segment_sum(token_rewards(batch), batch.row_lengths), batch.row_lengths > 0))


NO_CRITIC = {name: Mean(0.0, 0) for name in ("value_loss", "explained_variance", "value_mean", "return_mean")}


def critic_figures(critique: Critique, value: Term) -> dict[str, Metric]:
    """Metrics of a critic, with the ``value`` term before its coefficient."""
    return {
        "value_loss": value.metric(),
        "explained_variance": ExplainedVariance.of(critique.baseline, critique.returns),
        "value_mean": Mean.of(critique.predicted),
        "return_mean": Mean.of(critique.returns),
    }


class ValueConfig(AdvantageConfig):
    """Arguments of ``value_only``."""

    value_clip_epsilon: float | None = Field(0.2, gt=0, description="clip range of the values; None: no clip")


@register_loss(
    "value_only",
    config=ValueConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        row_field(
            "rewards", ROWS_OR_TOKENS, "Reward for each token; a row's reward is for its last token.", required=True
        ),
        row_field(
            "old_values", ROW_TOKENS, "Value of the state in which each token was emitted, at the time of sampling."
        ),
        row_field(
            "bootstrap_values",
            ("[rows]",),
            "Value of the state after the last token of truncated rows; 0 for terminated rows.",
        ),
    ),
    scores=("values",),
    metrics={
        "value_loss": "half the squared error of the critic, clipped",
        "explained_variance": "share of the returns' variance that the values explain",
        "value_mean": "mean of the critic's values",
        "return_mean": "mean return per token",
        "reward_mean": "mean over rows of the row's total reward",
    },
    reference="Schulman et al. 2016 (arXiv 1506.02438); value clip: Schulman et al. 2017 (arXiv 1707.06347)",
    formula="1/T sum_t 1/2 max((v_t - R_t)^2, (clip(v_t, v_old - eps, v_old + eps) - R_t)^2)",
    streams=lambda config, present: not config.whiten_rewards,
    whole_batch="variance of the rewards, with whiten_rewards",
    head="value",
)
def value_only(batch: Batch, scores: Scores, config: ValueConfig) -> LossOutput:
    """The critic's part of ``enhanced_ppo`` alone: warms up a value head, or trains a separate critic."""
    lengths, rewards = batch.row_lengths, token_rewards(batch)
    critique = criticise(batch, scores, rewards, config)
    value = reduced(
        value_losses(critique, config.value_clip_epsilon if config.clip_value_loss else None), lengths, config
    )
    return LossOutput({"value": value}, critic_figures(critique, value) | {"reward_mean": reward_mean(batch)})
