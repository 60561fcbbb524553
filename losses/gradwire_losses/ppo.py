"""Proximal policy optimisation with a critic. ``T`` scored tokens, ``S`` sequences.

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
from gradwire_losses.fields import (
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    ROW_TOKENS,
    ROWS_OR_TOKENS,
    row_field,
)
from gradwire_losses.kl import KL_ESTIMATORS, AdaptiveKL, KLEstimator, kl_estimate
from gradwire_losses.outputs import ExplainedVariance, LossOutput, Mean, Metric, Std, Term
from gradwire_losses.policy import clipped_surrogate, probability_ratio
from gradwire_losses.reduction import ReductionConfig, reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss


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


class PPOConfig(AdvantageConfig, PolicyConfig):
    """Arguments of ``enhanced_ppo``."""

    clip_epsilon: float = Field(0.2, gt=0, description="the ratio is clipped to 1 - clip_epsilon and 1 + it")
    clip_epsilon_high: float | None = Field(None, gt=0, description="upper side; clip_epsilon when None")
    dual_clip: float | None = Field(
        None, gt=1, description="where the advantage is negative, the ratio counts at most so"
    )
    value_loss_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    entropy_coef: float = Field(0.01, ge=0, description="weight of the entropy bonus")
    beta: float = Field(
        0.01, ge=0, description="weight of the KL to the reference; with no reference there is no such term"
    )
    kl_estimator: KLEstimator = Field("k3", description=KL_ESTIMATORS)
    kl_in_reward: bool = Field(
        False, description="take beta * (old_log_probs - reference's) from each token's reward instead of adding a term"
    )
    whiten_advantages: bool = Field(False, description="give the batch's advantages mean 0 and variance 1")
    kl_target: float | None = Field(
        None, gt=0, description="KL (nats a token) that next_beta steers kl_divergence to; None: next_beta is beta"
    )
    kl_horizon: float = Field(10000.0, gt=0, description="rows in which next_beta changes by a fifth at the most")


PPO_FIELDS = (
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    row_field("rewards", ROWS_OR_TOKENS, "Reward for each token; one a row is for its last token.", required=True),
    row_field("values", ROW_TOKENS, "Value of the state each token was emitted in, for runs with no value head."),
    row_field(
        "old_values", ROW_TOKENS, "That value when the batch was sampled: for the advantages and the value clip."
    ),
    row_field(
        "bootstrap_values",
        ("[rows]",),
        "Value of the state after the last token, of rows that were cut off; 0 at an end.",
    ),
    REF_LOG_PROBS,
)

PPO_METRICS = {
    "policy_loss": "the clipped surrogate",
    "value_loss": "half the squared error of the critic, clipped; before value_loss_coef",
    "entropy": "mean entropy of a token's distribution (nats)",
    "kl_divergence": "mean KL of a token to the reference (nats); with no reference, to the policy of old_log_probs",
    "approx_kl": "mean KL of a token from the policy of old_log_probs to this one, by k3 (nats)",
    "clip_fraction": "share of tokens whose ratio is clipped: they give no gradient",
    "advantage_mean": "mean advantage of a token, before whitening",
    "advantage_std": "its standard deviation",
    "explained_variance": "share of the returns' variance that the values explain which gave the advantages",
    "value_mean": "mean of the critic's values",
    "return_mean": "mean return of a token",
    "reward_mean": "mean over rows of the sum of a row's rewards",
    "next_beta": "the beta to call with next, to keep kl_divergence at kl_target",
}


def ppo_scores(config: PPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs", "entropy"}
    if "values" not in present:
        needed.add("values")
    if computed_by_engine(config, present):
        needed.add("ref_logprobs")
    return frozenset(needed)


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


@register_loss(
    "enhanced_ppo",
    config=PPOConfig,
    fields=PPO_FIELDS,
    scores=ppo_scores,
    optional_scores=("values",),
    metrics=PPO_METRICS,
    reference="Schulman et al. 2017, Proximal Policy Optimization Algorithms (arXiv 1707.06347)",
    formula="1/T sum_t [max(-r_t A_t, -clip(r_t, 1-eps, 1+eps) A_t) + c_v/2 max((v_t-R_t)^2, (clip(v_t)-R_t)^2) "
    "- c_e H_t + beta KL_t]",
    streams=lambda config, present: not (config.whiten_advantages or config.whiten_rewards),
)
def enhanced_ppo(batch: Batch, scores: Scores, config: PPOConfig) -> LossOutput:
    """Clipped surrogate with a critic, generalised advantage estimation, an entropy bonus and KL to a reference.

    loss = policy_loss + value_loss_coef * value_loss - entropy_coef * entropy + beta * kl_divergence, each a mean over
    all scored tokens of the accumulation. The last term is there with a reference only, and not with kl_in_reward.
    An adaptive KL coefficient (Ziegler et al. 2019, arXiv 1909.08593) is the caller's: give ``beta``, and next time the
    metric ``next_beta``.
    """
    old, reference, lengths = batch["old_log_probs"], reference_logprobs(batch, scores), batch.row_lengths
    rewards = token_rewards(batch)
    shaped = rewards
    if config.kl_in_reward and reference is not None:
        shaped = rewards - config.beta * kl_estimate(old, reference, config.kl_estimator)
    critique = criticise(batch, scores, shaped, config)
    advantages = whiten(critique.advantages) if config.whiten_advantages else critique.advantages

    ratio = probability_ratio(scores.logprobs, old)
    high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
    surrogate, clipped = clipped_surrogate(ratio, advantages, 1 - config.clip_epsilon, 1 + high, config.dual_clip)
    value_clip = config.value_clip_epsilon or config.clip_epsilon
    kl = kl_estimate(scores.logprobs, old if reference is None else reference, config.kl_estimator)

    policy = reduced(surrogate, lengths, config)
    value = reduced(value_losses(critique, value_clip if config.clip_value_loss else None), lengths, config)
    terms: dict[str, Term] = {"policy": policy}
    if config.value_loss_coef:
        terms["value"] = value.scaled(config.value_loss_coef)
    if config.entropy_coef:
        terms["entropy"] = reduced(scores.entropy, lengths, config).scaled(-config.entropy_coef)
    if config.beta and reference is not None and not config.kl_in_reward:
        terms["kl"] = reduced(kl, lengths, config).scaled(config.beta)

    row_rewards = select(segment_sum(rewards, lengths), lengths > 0)
    metrics: dict[str, Metric] = {
        "policy_loss": policy.metric(),
        "value_loss": value.metric(),
        "entropy": Mean.of(scores.entropy),
        "kl_divergence": Mean.of(kl),
        "approx_kl": Mean.of(kl_estimate(old, scores.logprobs, "k3")),
        "clip_fraction": Mean.of(clipped),
        "advantage_mean": Mean.of(critique.advantages),
        "advantage_std": Std.of(critique.advantages),
        "explained_variance": ExplainedVariance.of(critique.baseline, critique.returns),
        "value_mean": Mean.of(critique.predicted),
        "return_mean": Mean.of(critique.returns),
        "reward_mean": Mean.of(row_rewards),
        "next_beta": AdaptiveKL(config.beta, config.kl_target, config.kl_horizon, Mean.of(kl), len(row_rewards)),
    }
    return LossOutput(terms, metrics)


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
        "explained_variance": PPO_METRICS["explained_variance"],
        "value_mean": PPO_METRICS["value_mean"],
        "return_mean": PPO_METRICS["return_mean"],
        "reward_mean": PPO_METRICS["reward_mean"],
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
    return LossOutput(
        {"value": value},
        {
            "value_loss": value.metric(),
            "explained_variance": ExplainedVariance.of(critique.baseline, critique.returns),
            "value_mean": Mean.of(critique.predicted),
            "return_mean": Mean.of(critique.returns),
            "reward_mean": Mean.of(select(segment_sum(rewards, lengths), lengths > 0)),
        },
    )


class ConservativePPOConfig(PPOConfig):
    """Arguments of ``conservative_ppo``."""

    conservative_coef: float = Field(0.1, ge=0, description="weight of the squared excess of the batch's KL")
    max_kl_divergence: float = Field(0.01, ge=0, description="KL (nats a token) up to which nothing is taken")
    beta: float = Field(0.0, ge=0, description="weight of a KL term beside the penalty")


@register_loss(
    "conservative_ppo",
    config=ConservativePPOConfig,
    fields=PPO_FIELDS,
    scores=ppo_scores,
    optional_scores=("values",),
    metrics=PPO_METRICS
    | {
        "kl_violation": "by how much the batch's KL exceeds max_kl_divergence (nats a token)",
        "kl_penalty": "conservative_coef * kl_violation^2, as it is in the loss",
        "max_kl_threshold": "max_kl_divergence",
    },
    reference="Schulman et al. 2017 (arXiv 1707.06347), with a quadratic penalty outside a trust region",
    formula="PPO + c max(0, KL - KL_max)^2, KL the mean over the batch's tokens",
    streams=False,
)
def conservative_ppo(batch: Batch, scores: Scores, config: ConservativePPOConfig) -> LossOutput:
    """PPO held near the reference: the batch's KL costs nothing up to a bound, and its excess squared beyond.

    The KL is kl_divergence: to the reference model, or with no reference to the policy of old_log_probs. It is that
    of the whole batch, so a step over several calls takes the mean of the calls' penalties, weighted by tokens.
    """
    output = enhanced_ppo(batch, scores, config)
    reference = reference_logprobs(batch, scores)
    kl = kl_estimate(scores.logprobs, batch["old_log_probs"] if reference is None else reference, config.kl_estimator)
    violation = (kl.sum() / max(1, len(kl)) - config.max_kl_divergence).clamp(min=0)
    penalty = config.conservative_coef * violation.square()
    policy = output.terms["policy"]
    weight = 1.0 if policy.unit == "sum" else policy.count
    return LossOutput(
        dict(output.terms) | {"conservative": Term(penalty * weight, policy.count, policy.unit)},
        dict(output.metrics)
        | {
            "kl_violation": Mean(violation.detach() * len(kl), len(kl)),
            "kl_penalty": Mean(penalty.detach() * len(kl), len(kl)),
            "max_kl_threshold": Mean(config.max_kl_divergence, 1),
        },
    )
