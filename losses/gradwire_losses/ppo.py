"""Proximal policy optimisation with a critic. ``T`` scored tokens, ``S`` sequences.

``critic.py`` describes the critic and the values used for the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor

from gradwire_losses.advantages import whiten
from gradwire_losses.batch import Batch, BatchError, Scores, select, spread
from gradwire_losses.critic import (
    NO_CRITIC,
    AdvantageConfig,
    Critique,
    critic_figures,
    criticise,
    reward_mean,
    token_rewards,
    value_losses,
)
from gradwire_losses.fields import (
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    ROW_TOKENS,
    ROWS_OR_TOKENS,
    SAMPLER_LOG_PROBS,
    row_field,
)
from gradwire_losses.kl import KL_ESTIMATORS, AdaptiveKL, KLEstimator, kl_estimate
from gradwire_losses.monitoring import PPO_HINTS
from gradwire_losses.outputs import LossOutput, Max, Mean, Metric, Std, Term
from gradwire_losses.policy import clipped_surrogate, probability_ratio
from gradwire_losses.reduction import reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss
from gradwire_losses.sampler import (
    SAMPLER_METRICS,
    SAMPLER_RATIO_METRIC,
    SAMPLER_WHOLE_BATCH,
    SamplerConfig,
    rejected_by_sampler,
    sampler_metrics,
    sampler_ratio,
    sampler_weights,
)


class PPOConfig(SamplerConfig, AdvantageConfig, PolicyConfig):
    """Arguments of ``enhanced_ppo``."""

    clip_epsilon: float = Field(0.2, gt=0, description="the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon")
    clip_epsilon_high: float | None = Field(None, gt=0, description="upper clip range; clip_epsilon if None")
    dual_clip: float | None = Field(
        None, gt=1, description="upper bound of the ratio for negative advantages (two-sided clip: delta)"
    )
    value_loss_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    entropy_coef: float = Field(0.01, ge=0, description="weight of an entropy bonus")
    beta: float = Field(
        0.01, ge=0, description="weight of the KL to the reference; without a reference the term is absent"
    )
    kl_estimator: KLEstimator = Field("k3", description=KL_ESTIMATORS)
    kl_in_reward: bool = Field(
        False,
        description="subtract beta * (old_log_probs - reference's) from each token's reward instead of adding a loss "
        "term",
    )
    whiten_advantages: bool = Field(
        True,
        description="scale the advantages of the call's batch to mean 0 and variance 1; advantages in the batch are "
        "used unchanged",
    )
    kl_target: float | None = Field(
        None, gt=0, description="target of kl_divergence (nats per token) for next_beta; None: next_beta is beta"
    )
    kl_horizon: float = Field(
        10000.0, gt=0, description="number of rows over which next_beta changes by at most a fifth"
    )


PPO_FIELDS = (
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    row_field(
        "rewards",
        ROWS_OR_TOKENS,
        "Reward for each token; a row's reward is for its last token. Required without advantages.",
    ),
    row_field(
        "values", ROW_TOKENS, "Value of the state in which each token was emitted, for runs without a value head."
    ),
    row_field(
        "advantages",
        ROWS_OR_TOKENS,
        "Advantage of each row or token; overrides the advantages from rewards and values, so that no critic is "
        "needed.",
    ),
    row_field("old_values", ROW_TOKENS, "The value at the time of sampling, for the advantages and the value clip."),
    row_field(
        "bootstrap_values",
        ("[rows]",),
        "Value of the state after the last token of truncated rows; 0 for terminated rows.",
    ),
    REF_LOG_PROBS,
    SAMPLER_LOG_PROBS,
)

PPO_METRICS = {
    "policy_loss": "the clipped surrogate",
    "value_loss": "half the squared error of the critic, clipped; before value_loss_coef",
    "entropy": "mean entropy per token (nats)",
    "kl_divergence": "mean KL per token to the reference (nats), by kl_estimator; without a reference, to the "
    "policy of old_log_probs",
    "approx_kl": "mean KL per token from the policy of old_log_probs to the current one, by k3 (nats)",
    "clip_fraction": "share of tokens whose loss a bound of the ratio decides; 0 without clipping",
    "advantage_mean": "mean advantage per token in the surrogate, normalised by default",
    "advantage_std": "standard deviation of the advantages",
    "advantage_mean_raw": "mean advantage per token before whiten_advantages",
    "advantage_std_raw": "its standard deviation",
    "explained_variance": "share of the returns' variance explained by the values that the advantages were estimated "
    "with",
    "value_mean": "mean of the critic's values",
    "return_mean": "mean return per token",
    "reward_mean": "mean over rows of the row's total reward",
    "kept_fraction": "share of scored tokens left by sampler_rejection",
    **SAMPLER_RATIO_METRIC,
    **SAMPLER_METRICS,
    "next_beta": "the beta for the next call, to keep kl_divergence at kl_target",
}


PPO_WHOLE_BATCH = (
    "mean and variance of the advantages, with whiten_advantages, unless the batch has advantages; variance of the "
    f"rewards, with whiten_rewards; {SAMPLER_WHOLE_BATCH}"
)


def ppo_streams(config: PPOConfig, present: frozenset[str]) -> bool:
    normalized = config.sampler_normalize and config.sampler_correction is not None
    return not (normalized or config.whiten_rewards or (config.whiten_advantages and "advantages" not in present))


def ppo_scores(config: PPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs", "entropy"}
    if not present & {"values", "advantages"}:
        needed.add("values")
    if computed_by_engine(config, present):
        needed.add("ref_logprobs")
    return frozenset(needed)


@register_loss(
    "enhanced_ppo",
    config=PPOConfig,
    fields=PPO_FIELDS,
    scores=ppo_scores,
    optional_scores=("values",),
    hints=PPO_HINTS,
    metrics=PPO_METRICS,
    reference="Schulman et al. 2017, Proximal Policy Optimization Algorithms (arXiv 1707.06347)",
    formula="1/T sum_t [max(-r_t A_t, -clip(r_t, 1-eps, 1+eps) A_t) + c_v/2 max((v_t-R_t)^2, (clip(v_t)-R_t)^2) "
    "- c_e H_t + beta KL_t]",
    streams=ppo_streams,
    whole_batch=PPO_WHOLE_BATCH,
)
def enhanced_ppo(batch: Batch, scores: Scores, config: PPOConfig) -> LossOutput:
    """Clipped surrogate with a critic, generalised advantage estimation, an entropy bonus and KL to a reference.

    loss = policy_loss + value_loss_coef * value_loss - entropy_coef * entropy + beta * kl_divergence, each a mean over
    all scored tokens of the accumulation. The last term is present only with a reference and without kl_in_reward. An
    adaptive KL coefficient (Ziegler et al. 2019, arXiv 1909.08593) is left to the caller: pass ``beta``, and for the
    next call the metric ``next_beta``. With ``advantages`` in the batch a critic is trained if there are rewards and a
    value head; otherwise there is no value loss. A row that ``sampler_rejection`` leaves out counts nowhere, as if it
    were not in the batch.

    Raises:
        BatchError: The batch has neither ``rewards`` nor ``advantages``."""
    return _objective(*_kept(batch, scores, config), config)


def _kept(batch: Batch, scores: Scores, config: PPOConfig) -> tuple[Batch, Scores, Metric]:
    """The rows that ``sampler_rejection`` leaves, their scores, and their share of the tokens."""
    share = Mean(batch.num_scored, batch.num_scored)
    if config.sampler_rejection is None:
        return batch, scores, share
    rejected = rejected_by_sampler(batch, config)
    if not rejected.any():
        return batch, scores, share
    rows, tokens = (~rejected).nonzero().squeeze(1), spread(~rejected, batch.row_lengths)
    kept = batch.host.select(rows).to(batch.input_ids.device)
    left = Scores({name: select(values, tokens) for name, values in scores.by_name.items()})
    return kept, left, Mean.of(tokens)


def _objective(batch: Batch, scores: Scores, kept: Metric, config: PPOConfig) -> LossOutput:
    old, reference, lengths = batch["old_log_probs"], reference_logprobs(batch, scores), batch.row_lengths
    critique = _critique(batch, scores, config, reference)
    raw, advantages = _advantages(batch, critique, config)

    ratio = probability_ratio(scores.logprobs, old)
    high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
    surrogate, clipped = clipped_surrogate(ratio, advantages, 1 - config.clip_epsilon, 1 + high, config.dual_clip)
    kl = kl_estimate(scores.logprobs, old if reference is None else reference, config.kl_estimator)
    weights = sampler_weights(batch, old, config)
    if weights is not None:
        surrogate = weights * surrogate

    policy = reduced(surrogate, lengths, config)
    terms: dict[str, Term] = {"policy": policy}
    critic_metrics: Mapping[str, Metric] = NO_CRITIC
    if critique is not None:
        value_clip = config.value_clip_epsilon or config.clip_epsilon
        value = reduced(value_losses(critique, value_clip if config.clip_value_loss else None), lengths, config)
        critic_metrics = critic_figures(critique, value)
        if config.value_loss_coef:
            terms["value"] = value.scaled(config.value_loss_coef)
    if config.entropy_coef:
        terms["entropy"] = reduced(scores.entropy, lengths, config).scaled(-config.entropy_coef)
    if config.beta and reference is not None and not config.kl_in_reward:
        terms["kl"] = reduced(kl, lengths, config).scaled(config.beta)

    rows = int((lengths > 0).sum())
    metrics: dict[str, Metric] = {
        "policy_loss": policy.metric(),
        "entropy": Mean.of(scores.entropy),
        "kl_divergence": Mean.of(kl),
        "approx_kl": Mean.of(kl_estimate(old, scores.logprobs, "k3")),
        "clip_fraction": Mean.of(clipped),
        "advantage_mean": Mean.of(advantages),
        "advantage_std": Std.of(advantages),
        "advantage_mean_raw": Mean.of(raw),
        "advantage_std_raw": Std.of(raw),
        "reward_mean": reward_mean(batch),
        "kept_fraction": kept,
        "sampler_ratio_mean": sampler_ratio(weights),
        **sampler_metrics(batch, scores.logprobs, old),
        "next_beta": AdaptiveKL(config.beta, config.kl_target, config.kl_horizon, Mean.of(kl), rows),
    }
    everywhere = config.sampler_rejection is None  # which leaves out rows
    return LossOutput(terms, {**metrics, **critic_metrics}, advantages if everywhere else None)


def _critique(batch: Batch, scores: Scores, config: PPOConfig, reference: Tensor | None) -> Critique | None:
    """Compute the critique; None if the batch has advantages but lacks the rewards or values that a critic needs."""
    if "rewards" not in batch.fields or not ("values" in scores or "values" in batch.fields):
        return None
    rewards = token_rewards(batch)
    if config.kl_in_reward and reference is not None:
        rewards = rewards - config.beta * kl_estimate(batch["old_log_probs"], reference, config.kl_estimator)
    return criticise(batch, scores, rewards, config)


def _advantages(batch: Batch, critique: Critique | None, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """``[T], [T]``: advantages per token, as estimated or given, and as used in the surrogate."""
    if "advantages" in batch.fields:
        given = batch.per_token("advantages")
        return given, given
    if critique is None:
        raise BatchError(
            "the batch has neither rewards nor advantages: add the reward or the advantage of each token or row",
            field="rewards",
            rule="rewards or advantages",
        )
    return critique.advantages, whiten(critique.advantages) if config.whiten_advantages else critique.advantages


class ConservativePPOConfig(PPOConfig):
    """Arguments of ``conservative_ppo``."""

    conservative_coef: float = Field(0.1, ge=0, description="weight of the squared excess of the batch's KL")
    max_kl_divergence: float = Field(0.01, ge=0, description="KL (nats per token) up to which there is no penalty")
    beta: float = Field(0.0, ge=0, description="weight of a KL term in addition to the penalty")


@register_loss(
    "conservative_ppo",
    config=ConservativePPOConfig,
    fields=PPO_FIELDS,
    scores=ppo_scores,
    optional_scores=("values",),
    hints=PPO_HINTS,
    metrics=PPO_METRICS
    | {
        "kl_violation": "1 where the batch's KL exceeds max_kl_divergence, else 0",
        "kl_excess": "by how much the batch's KL exceeds max_kl_divergence (nats per token)",
        "kl_penalty": "conservative_coef * kl_excess^2, as in the loss",
        "max_kl_threshold": "max_kl_divergence",
    },
    reference="Schulman et al. 2017 (arXiv 1707.06347), with a quadratic penalty outside a trust region",
    formula="PPO + c max(0, KL - KL_max)^2, KL the mean over the batch's tokens",
    streams=False,
    whole_batch=f"the KL that its penalty is of; {PPO_WHOLE_BATCH}",
)
def conservative_ppo(batch: Batch, scores: Scores, config: ConservativePPOConfig) -> LossOutput:
    """PPO with a penalty on the batch's KL: nothing up to a bound, and the square of the excess beyond it.

    The KL is kl_divergence: to the reference model, or without a reference to the policy of old_log_probs. It is that
    of the whole batch, so a step over several calls takes the mean of the calls' penalties, weighted by tokens.
    """
    batch, scores, kept = _kept(batch, scores, config)
    output = _objective(batch, scores, kept, config)
    reference = reference_logprobs(batch, scores)
    kl = kl_estimate(scores.logprobs, batch["old_log_probs"] if reference is None else reference, config.kl_estimator)
    excess = (kl.sum() / max(1, len(kl)) - config.max_kl_divergence).clamp(min=0)
    penalty = config.conservative_coef * excess.square()
    policy = output.terms["policy"]
    weight = 1.0 if policy.unit == "sum" else policy.count
    return LossOutput(
        dict(output.terms) | {"conservative": Term(penalty * weight, policy.count, policy.unit)},
        dict(output.metrics)
        | {
            "kl_violation": Max((excess.detach() > 0).double()),
            "kl_excess": Mean(excess.detach() * len(kl), len(kl)),
            "kl_penalty": Mean(penalty.detach() * len(kl), len(kl)),
            "max_kl_threshold": Mean(config.max_kl_divergence, 1),
        },
    )
