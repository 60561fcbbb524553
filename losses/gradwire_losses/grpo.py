"""Group relative policy optimisation without a critic: a group of responses to one prompt is the baseline.

``B`` prompts, ``S`` responses of all prompts, ``T`` scored tokens of all responses. One objective with options; the
papers' named variants, which only change its defaults, are in ``grpo_variants.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire_losses.advantages import (
    amplify_planning,
    gpg_scale,
    group_advantages,
    group_spread,
    opo_advantages,
    rloo_advantages,
    whiten,
)
from gradwire_losses.batch import Batch, BatchError, Scores, segment_sum, select, spread
from gradwire_losses.fields import GROUP_POLICY_FIELDS
from gradwire_losses.group_config import GRPOConfig
from gradwire_losses.group_surrogates import SurrogateInputs, surrogate_losses, token_ratios, uncertain_tokens
from gradwire_losses.kl import kl_estimate
from gradwire_losses.outputs import LossOutput, Mean, Metric, Std, Term
from gradwire_losses.reduction import reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import ScoreName, register_loss
from gradwire_losses.sampler import (
    SAMPLER_METRICS,
    SAMPLER_RATIO_METRIC,
    SAMPLER_WHOLE_BATCH,
    rejected_by_sampler,
    sampler_metrics,
    sampler_ratio,
    sampler_weights,
)

GRPO_METRICS = {
    "policy_loss": "the surrogate",
    "entropy": "mean entropy per token (nats)",
    "kl_divergence": "mean KL per token to the reference (nats), by kl_estimator; without a reference, to the "
    "policy of old_log_probs",
    "approx_kl": "mean KL per token from the policy of old_log_probs to the current one, by k3 (nats)",
    "clip_fraction": "share of tokens whose loss a bound of the ratio decides; with dppo_tv and dppo_kl, of those "
    "outside the trust region; with clip_cov and kl_cov, of those selected by their covariance; 0 without clipping",
    "advantage_mean": "mean advantage per response (or per token, if tokens have their own), before whitening and "
    "planning_alpha",
    "advantage_std": "standard deviation of the advantages",
    "reward_mean": "mean reward per response",
    "group_reward_mean": "mean over groups of the group's mean reward",
    "group_reward_std": "mean over groups of the standard deviation of the group's rewards",
    "zero_spread_groups": "share of groups of equal rewards: no gradient, unless tokens have baselines of their own",
    "kept_fraction": "share of scored tokens left by mask_truncated, mask_zero_spread and sampler_rejection",
    **SAMPLER_RATIO_METRIC,
    **SAMPLER_METRICS,
    "planning_fraction": "share of scored tokens that planning_mask marks; NaN without it",
}


def grpo_scores(config: GRPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs", "entropy"}
    return frozenset(needed | {"ref_logprobs"} if computed_by_engine(config, present) else needed)


def needs_whole_batch(config: GRPOConfig) -> bool:
    """Whether the surrogate compares a token with all other tokens of the batch."""
    normalized = config.sampler_normalize and config.sampler_correction is not None
    return normalized or config.top_entropy_quantile < 1 or config.surrogate in ("clip_cov", "kl_cov")


COMPARED_TOKENS = (
    'the entropy\'s quantile, with top_entropy_quantile; covariances over tokens, with surrogate "clip_cov" or '
    f'"kl_cov"; {SAMPLER_WHOLE_BATCH}'
)
GRPO_WHOLE_BATCH = (
    'unless the batch has advantages, their mean and variance, with whiten_advantages or scale_rewards="batch", or the '
    f"share of them that counts, with advantage_scale; {COMPARED_TOKENS}"
)
"""When losses over groups do not stream, for ``whole_batch``."""


def grpo_streams(config: GRPOConfig, present: frozenset[str]) -> bool:
    own = "advantages" not in present and (config.scale_rewards == "batch" or config.whiten_advantages)
    whole = config.advantage_scale is not None and "advantages" not in present
    return not (own or whole or needs_whole_batch(config))


@register_loss(
    "grpo",
    config=GRPOConfig,
    layout="groups",
    fields=GROUP_POLICY_FIELDS,
    scores=grpo_scores,
    metrics=GRPO_METRICS,
    reference="Shao et al. 2024, DeepSeekMath (arXiv 2402.03300)",
    formula="1/S sum_i 1/|o_i| sum_t [max(-r_it A_i, -clip(r_it, 1-eps, 1+eps) A_i) + beta KL_it], "
    "A_i = (R_i - mean_group R) / (std_group R + 1e-4)",
    streams=grpo_streams,
    whole_batch=GRPO_WHOLE_BATCH,
)
def grpo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """Clipped surrogate whose advantage is a response's reward relative to the other responses to its prompt.

    loss = policy_loss + beta * KL - entropy_coef * entropy, averaged as ``reduction`` says. A group of one response,
    or of equal rewards, has advantage 0. Without ``old_log_probs`` every ratio is 1: one step on fresh samples. A
    response without a scored token counts only in its group's baseline; leave a response with unknown reward
    out of its group. ``advantages`` in the batch are used unchanged.
    """
    return group_objective(batch, scores, config, *reward_advantages(batch, scores, config))


def old_logprobs(batch: Batch, scores: Scores) -> Tensor:
    """``[T]``: log-probabilities under the policy that wrote the batch; by default the current policy's, without
    gradient."""
    given = batch.get("old_log_probs")
    return scores.logprobs.detach() if given is None else given


def reward_advantages(batch: Batch, scores: Scores, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Advantages from the batch, or from its rewards: per token, and in the form that is reported.

    Returns:
        ``[T]``, and ``[S]``, or ``[T]`` again if a response's tokens have their own.

    Raises:
        BatchError: The batch has neither.
    """
    if "advantages" in batch.fields:
        return batch.per_token("advantages"), batch["advantages"]
    if "rewards" not in batch.fields:
        raise BatchError(
            "the batch has neither rewards nor advantages: add the reward or the advantage of each response",
            field="rewards",
            rule="rewards or advantages",
        )
    rewards, sizes, lengths = batch["rewards"], batch.group_sizes, batch.row_lengths
    reference = reference_logprobs(batch, scores)
    if config.kl_in_reward and reference is not None:
        kl = kl_estimate(old_logprobs(batch, scores), reference, config.kl_estimator)
        rewards = rewards - config.beta * segment_sum(kl, lengths)
    if config.baseline == "leave_one_out":
        advantages = rloo_advantages(rewards, sizes)
    elif config.baseline == "length_weighted":
        advantages = opo_advantages(rewards, lengths, sizes)
    else:
        advantages = group_advantages(rewards, sizes, scale=False)
    if config.scale_rewards == "batch":
        advantages = _divided(advantages, rewards.std() if len(rewards) > 1 else rewards.new_zeros(()), config)
    elif config.scale_rewards:
        advantages = _divided(advantages, spread(group_spread(rewards, sizes)[1], sizes), config)
    if config.advantage_scale is not None:
        advantages = advantages * gpg_scale(rewards, sizes, count=config.advantage_scale)
    per_token = spread(advantages, lengths)
    return (whiten(per_token) if config.whiten_advantages else per_token), advantages


def _divided(advantages: Tensor, deviation: Tensor, config: GRPOConfig) -> Tensor:
    """Divide by the deviation; 0 where the deviation is 0, also with ``scale_epsilon`` 0."""
    return advantages / torch.where(deviation > 0, deviation + config.scale_epsilon, 1.0)


def group_objective(
    batch: Batch, scores: Scores, config: GRPOConfig, advantages: Tensor, reported: Tensor
) -> LossOutput:
    """The objective with these advantages ``[T]``; ``reported`` are the advantages for the metrics.

    Raises:
        BatchError: An argument needs a field that the batch does not have.
    """
    planning = _planning(batch, config)
    if planning is not None:
        advantages = amplify_planning(advantages, planning, config.planning_alpha)
    lengths, reference, old = batch.row_lengths, reference_logprobs(batch, scores), old_logprobs(batch, scores)
    uncertain = uncertain_tokens(scores.entropy.detach(), config.top_entropy_quantile)
    weights = sampler_weights(batch, old, config)
    tokens = SurrogateInputs(scores.logprobs, old, advantages, lengths, uncertain, weights)
    surrogate, clipped = surrogate_losses(tokens, config)
    kl = kl_estimate(scores.logprobs, old if reference is None else reference, config.kl_estimator)

    counting = _kept_sequences(batch, config)
    kept, kept_lengths = spread(counting, lengths), torch.where(counting, lengths, 0)
    policy = reduced(select(surrogate, kept), kept_lengths, config)
    terms: dict[str, Term] = {"policy": policy}
    if config.beta and reference is not None and not config.kl_in_reward:
        corrected = kl
        if config.use_bias_correction_kl:
            corrected = kl * token_ratios(scores.logprobs, old, lengths, config)
        terms["kl"] = reduced(select(corrected, kept), kept_lengths, config).scaled(config.beta)
    if config.entropy_coef:
        terms["entropy"] = reduced(select(scores.entropy, kept), kept_lengths, config).scaled(-config.entropy_coef)
    return LossOutput(
        terms,
        {
            "policy_loss": policy.metric(),
            "entropy": Mean.of(scores.entropy),
            "kl_divergence": Mean.of(kl),
            "approx_kl": Mean.of(kl_estimate(old, scores.logprobs, "k3")),
            "clip_fraction": Mean.of(clipped),
            "advantage_mean": Mean.of(reported),
            "advantage_std": Std.of(reported),
            **_reward_metrics(batch),
            "kept_fraction": Mean.of(kept),
            "sampler_ratio_mean": sampler_ratio(weights),
            **sampler_metrics(batch, scores.logprobs, batch.get("old_log_probs")),
            "planning_fraction": Mean(0.0, 0) if planning is None else Mean.of(planning),
        },
        advantages,
    )


def _planning(batch: Batch, config: GRPOConfig) -> Tensor | None:
    """``[T]`` bool: the tokens whose advantages are amplified; None if the batch marks none."""
    if "planning_mask" not in batch.fields and config.planning_alpha and "planning_alpha" in config.model_fields_set:
        raise BatchError(
            "planning_alpha needs planning_mask, which marks the planning tokens of each response",
            field="planning_mask",
            rule="required with planning_alpha",
        )
    return batch.get("planning_mask")


def _reward_metrics(batch: Batch) -> dict[str, Metric]:
    """Metrics of the rewards; NaN if the batch has advantages and no rewards."""
    if "rewards" not in batch.fields:
        names = ("reward_mean", "group_reward_mean", "group_reward_std", "zero_spread_groups")
        return {name: Mean(0.0, 0) for name in names}
    mean, std, differ = group_spread(batch["rewards"], batch.group_sizes)
    return {
        "reward_mean": Mean.of(batch["rewards"]),
        "group_reward_mean": Mean.of(mean),
        "group_reward_std": Mean.of(std),
        "zero_spread_groups": Mean.of(~differ),
    }


def _kept_sequences(batch: Batch, config: GRPOConfig) -> Tensor:
    """``[S]`` bool, on the host: the responses that count."""
    fields = batch.host
    kept = torch.ones(batch.num_sequences, dtype=torch.bool)
    if config.mask_zero_spread and "advantages" not in batch.fields:
        kept &= spread(group_spread(fields["rewards"], batch.group_sizes)[2], batch.group_sizes)
    if config.sampler_rejection is not None:
        kept &= ~rejected_by_sampler(batch, config)
    if config.mask_truncated and "truncated" in batch.fields:
        kept &= ~fields["truncated"]
    elif config.mask_truncated and "mask_truncated" in config.model_fields_set:  # set explicitly, not by default
        raise BatchError(
            "mask_truncated needs truncated, which marks the responses that were cut off",
            field="truncated",
            rule="required with mask_truncated",
        )
    return kept
