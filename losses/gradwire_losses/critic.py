"""The critic of a policy gradient: values, the advantages and returns they give, and what it learns from them.

``T`` scored tokens, ``S`` sequences.

Who is the critic:

* The server's value head, where the run has one (``create_run(..., head="value")``): it is trained by the value loss.
* The batch's ``values``, where the run has none: numbers, so the value loss is reported and trains nothing.

Which values the advantages are estimated with, always without gradient: the batch's ``old_values``, else its
``values``, else the head's of this very call. They are also what ``clip_value_loss`` keeps the head close to; with the
head's own of this call there is nothing to clip. So to take several steps on one batch, ask ``forward`` for the values
before the first and give them as ``old_values``.
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
    """Arguments that say how advantages are estimated and what the critic learns."""

    whiten_rewards: bool = Field(
        False, description="give the batch's rewards (less the KL's) variance 1, their mean kept"
    )
    use_gae: bool = Field(True, description="else advantages are discounted returns less values: gae_lambda 1")
    gamma: float = Field(0.99, ge=0, le=1, description="discount of a token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="bias against variance of the advantages")
    clip_value_loss: bool = Field(True, description="keep the critic within value_clip_epsilon of old_values")
    value_clip_epsilon: float | None = Field(None, gt=0, description="clip_epsilon when None")


@dataclass(frozen=True)
class Critique:
    """What a critic makes of a batch.

    Attributes:
        predicted: ``[T]``, of the critic that is trained; differentiable if it is the server's head.
        baseline: ``[T]``, the values that advantages were estimated with.
        advantages, returns: ``[T]``; no gradient.
    """

    predicted: Tensor
    baseline: Tensor
    advantages: Tensor
    returns: Tensor


def criticise(batch: Batch, scores: Scores, rewards: Tensor, config: AdvantageConfig) -> Critique:
    """Values, advantages and returns; ``rewards [T]``."""
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
    """``[T]``: ``1/2 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2)``; the first alone with no clip."""
    error = (critique.predicted - critique.returns).square()
    if clip_epsilon is not None:
        moved = (critique.predicted - critique.baseline).clamp(-clip_epsilon, clip_epsilon)
        error = torch.maximum(error, (critique.baseline + moved - critique.returns).square())
    return 0.5 * error


def token_rewards(batch: Batch) -> Tensor:
    """``[T]``: the batch's rewards; one a row goes to its last scored token."""
    rewards = batch["rewards"]
    return at_last_token(rewards, batch.row_lengths) if batch.levels["rewards"] == "sequence" else rewards


def reward_mean(batch: Batch) -> Mean:
    """Of a row with a scored token, its rewards added up; NaN without rewards."""
    if "rewards" not in batch.fields:
        return Mean(0.0, 0)
    return Mean.of(select(segment_sum(token_rewards(batch), batch.row_lengths), batch.row_lengths > 0))


NO_CRITIC = {name: Mean(0.0, 0) for name in ("value_loss", "explained_variance", "value_mean", "return_mean")}


def critic_figures(critique: Critique, value: Term) -> dict[str, Metric]:
    """The metrics of a critic, with the ``value`` term before its coefficient."""
    return {
        "value_loss": value.metric(),
        "explained_variance": ExplainedVariance.of(critique.baseline, critique.returns),
        "value_mean": Mean.of(critique.predicted),
        "return_mean": Mean.of(critique.returns),
    }


class ValueConfig(AdvantageConfig):
    """Arguments of ``value_only``."""

    value_clip_epsilon: float | None = Field(0.2, gt=0, description="None: no clip")


@register_loss(
    "value_only",
    config=ValueConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        row_field("rewards", ROWS_OR_TOKENS, "Reward for each token; one a row is for its last token.", required=True),
        row_field(
            "old_values", ROW_TOKENS, "Value of the state each token was emitted in, when the batch was sampled."
        ),
        row_field(
            "bootstrap_values",
            ("[rows]",),
            "Value of the state after the last token, of rows that were cut off; 0 at an end.",
        ),
    ),
    scores=("values",),
    metrics={
        "value_loss": "half the squared error of the critic, clipped",
        "explained_variance": "share of the returns' variance that the values explain",
        "value_mean": "mean of the critic's values",
        "return_mean": "mean return of a token",
        "reward_mean": "mean over rows of the sum of a row's rewards",
    },
    reference="Schulman et al. 2016 (arXiv 1506.02438); value clip: Schulman et al. 2017 (arXiv 1707.06347)",
    formula="1/T sum_t 1/2 max((v_t - R_t)^2, (clip(v_t, v_old - eps, v_old + eps) - R_t)^2)",
    streams=lambda config, present: not config.whiten_rewards,
    head="value",
)
def value_only(batch: Batch, scores: Scores, config: ValueConfig) -> LossOutput:
    """The critic's half of ``enhanced_ppo`` alone: to warm a value head up, or to train a critic of its own."""
    lengths, rewards = batch.row_lengths, token_rewards(batch)
    critique = criticise(batch, scores, rewards, config)
    value = reduced(
        value_losses(critique, config.value_clip_epsilon if config.clip_value_loss else None), lengths, config
    )
    return LossOutput({"value": value}, critic_figures(critique, value) | {"reward_mean": reward_mean(batch)})
