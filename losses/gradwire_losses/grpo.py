"""Group relative policy optimisation: no critic, a group of responses to one prompt is its own baseline.

``B`` prompts, ``S`` responses of all prompts, ``T`` scored tokens of all responses. One objective with options; the
papers' variants by name, which are this one with other defaults, are in ``grpo_variants.py``.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire_losses.advantages import (
    amplify_planning,
    group_advantages,
    group_spread,
    opo_advantages,
    rloo_advantages,
    whiten,
)
from gradwire_losses.batch import Batch, BatchError, Scores, segment_sum, select, spread
from gradwire_losses.fields import GROUP_POLICY_FIELDS
from gradwire_losses.kl import KL_ESTIMATORS, KLEstimator, kl_estimate
from gradwire_losses.outputs import LossOutput, Mean, Metric, Std, Term
from gradwire_losses.policy import (
    clipped_surrogate,
    geometric_surrogate,
    own_gradient_ratio,
    probability_ratio,
    sequence_log_ratio,
    soft_surrogate,
    weighted_surrogate,
)
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss

STD_FLOOR = 1e-4


class GRPOConfig(PolicyConfig, ReductionConfig):
    """Arguments of ``grpo``."""

    beta: float = Field(
        0.01, ge=0, description="weight of the KL to the reference; with no reference there is no such term"
    )
    clip_epsilon: float = Field(0.2, gt=0, description="the ratio is clipped to 1 - clip_epsilon and 1 + it")
    clip_epsilon_high: float | None = Field(None, gt=0, description="upper side; clip_epsilon when None")
    dual_clip: float | None = Field(
        None, gt=1, description="where the advantage is negative, the ratio counts at most so (two-sided clip: delta)"
    )
    baseline: Literal["mean", "leave_one_out", "length_weighted"] = Field(
        "mean", description="what is taken from a reward: the group's mean, that of the others, or that by length"
    )
    scale_rewards: bool | Literal["batch"] = Field(
        True, description="divide advantages by the group's standard deviation + 1e-4, or by the whole \"batch\"'s"
    )
    whiten_advantages: bool = Field(False, description="give the tokens' advantages mean 0 and variance 1 in the batch")
    planning_alpha: float = Field(
        0.2,
        ge=0,
        le=1,
        description="with planning_mask: A becomes A + planning_alpha * |A| at planning tokens (HICRA), last of all",
    )
    importance: Literal["token", "sequence", "sequence_token", "trajectory"] = Field(
        "token",
        description="whose ratio a token has. sequence: the geometric mean of its response's ratios (GSPO); "
        "sequence_token: that value with the token's own gradient; trajectory: their product",
    )
    surrogate: Literal["clip", "cispo", "sapo", "gmpo", "reinforce"] = Field(
        "clip",
        description="clip: PPO's. cispo: the clipped ratio as a weight without gradient. sapo: a soft gate. gmpo: a "
        "response's geometric mean of clipped ratios. reinforce: log-probability times advantage, no ratio",
    )
    ratio_min: float = Field(0.0, ge=0, description="for surrogate cispo: the weight is at least so")
    ratio_max: float = Field(5.0, gt=0, description="for surrogate cispo: and at most so")
    sapo_temperature_pos: float = Field(1.0, gt=0, description="for surrogate sapo: of the gate where A > 0")
    sapo_temperature_neg: float = Field(1.05, gt=0, description="for surrogate sapo: of the gate elsewhere")
    top_entropy_quantile: float = Field(
        1.0, gt=0, le=1, description="only this share of the batch's tokens, of highest entropy, have a policy loss"
    )
    mask_truncated: bool = Field(False, description="responses marked truncated count nowhere but in their baseline")
    mask_zero_spread: bool = Field(
        False,
        description="groups whose rewards are all equal count nowhere; advantages given with the batch are all used",
    )
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        None,
        description="weigh the policy loss by old_log_probs' probability over sampler_log_probs', of a token or of all "
        "of a response's together, truncated to sampler_ratio_min and sampler_ratio_max or 0 outside them",
    )
    sampler_ratio_max: float = Field(3.0, gt=0, description="for sampler_correction: the largest weight")
    sampler_ratio_min: float = Field(0.0, ge=0, description="for sampler_correction: the smallest weight")
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    kl_estimator: KLEstimator = Field("k3", description=KL_ESTIMATORS)
    kl_in_reward: bool = Field(
        False,
        description="take beta * (old_log_probs - reference's), summed over tokens, from each response's reward, and "
        "have no KL term; advantages given with the batch have it in them then",
    )
    reduction: Reduction = Field("sequence_mean", description=ReductionConfig.model_fields["reduction"].description)

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 (for GMPO: below and above 0, of the log-ratio)."""
        return self.clip_epsilon, self.clip_epsilon if self.clip_epsilon_high is None else self.clip_epsilon_high


GRPO_METRICS = {
    "policy_loss": "the surrogate",
    "entropy": "mean entropy of a token's distribution (nats)",
    "kl_divergence": "mean KL of a token to the reference (nats); with no reference, to the policy of old_log_probs",
    "approx_kl": "mean KL of a token from the policy of old_log_probs to this one, by k3 (nats)",
    "clip_fraction": "share of tokens whose ratio is clipped; without clipping, 0",
    "advantage_mean": "mean advantage of a response (or of a token, where tokens have their own), before whitening "
    "and planning_alpha",
    "advantage_std": "its standard deviation",
    "reward_mean": "mean reward of a response",
    "group_reward_mean": "mean over groups of a group's mean reward",
    "group_reward_std": "mean over groups of the standard deviation of a group's rewards",
    "zero_spread_groups": "share of groups whose rewards are all equal: they teach nothing",
    "kept_fraction": "share of scored tokens that mask_truncated and mask_zero_spread leave",
    "sampler_ratio_mean": "mean weight of a token by sampler_correction; NaN without",
    "planning_fraction": "share of scored tokens that planning_mask marks; NaN without",
}


def grpo_scores(config: GRPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs", "entropy"}
    return frozenset(needed | {"ref_logprobs"} if computed_by_engine(config, present) else needed)


def grpo_streams(config: GRPOConfig, present: frozenset[str]) -> bool:
    own = "advantages" not in present and (config.scale_rewards == "batch" or config.whiten_advantages)
    return not own and config.top_entropy_quantile == 1


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
)
def grpo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """Clipped surrogate whose advantage is a response's reward relative to the others' to its prompt.

    loss = policy_loss + beta * KL - entropy_coef * entropy, averaged as ``reduction`` says. A group of one response,
    or of equal rewards, has advantage 0. Without ``old_log_probs`` every ratio is 1: one step on fresh samples. A
    response with no scored token counts for its group's baseline and nowhere else; one whose reward is not known is
    best left out of its group. ``advantages`` given with the batch are taken as they are.
    """
    return group_objective(batch, scores, config, *reward_advantages(batch, scores, config))


def old_logprobs(batch: Batch, scores: Scores) -> Tensor:
    """``[T]``: of the policy that wrote the batch; this one's, without gradient, where the batch says nothing."""
    given = batch.get("old_log_probs")
    return scores.logprobs.detach() if given is None else given


def reward_advantages(batch: Batch, scores: Scores, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Given with the batch, or from its rewards as the arguments say: of each token, and to be reported.

    Returns:
        ``[T]``, and ``[S]``, or ``[T]`` again where a response's tokens have their own.

    Raises:
        BatchError: when the batch has neither.
    """
    if "advantages" in batch.fields:
        return batch.per_token("advantages"), batch["advantages"]
    if "rewards" not in batch.fields:
        raise BatchError(
            "the batch has neither rewards nor advantages: give the reward of each response, or its advantage",
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
        advantages = advantages / ((rewards.std() if len(rewards) > 1 else 0.0) + STD_FLOOR)
    elif config.scale_rewards:
        advantages = advantages / (spread(group_spread(rewards, sizes)[1], sizes) + STD_FLOOR)
    per_token = spread(advantages, lengths)
    return (whiten(per_token) if config.whiten_advantages else per_token), advantages


def group_objective(
    batch: Batch, scores: Scores, config: GRPOConfig, advantages: Tensor, reported: Tensor
) -> LossOutput:
    """The objective with these advantages ``[T]``; ``reported`` are those that the metrics are about.

    Raises:
        BatchError: when an argument needs a field that the batch has not.
    """
    planning = _planning(batch, config)
    if planning is not None:
        advantages = amplify_planning(advantages, planning, config.planning_alpha)
    lengths, reference, old = batch.row_lengths, reference_logprobs(batch, scores), old_logprobs(batch, scores)
    uncertain = _uncertain(scores.entropy.detach(), config.top_entropy_quantile)
    surrogate, clipped = _surrogate(scores.logprobs, old, advantages, lengths, uncertain, config)
    weights = _sampler_weights(batch, old, config)
    if weights is not None:
        surrogate = surrogate * weights
    kl = kl_estimate(scores.logprobs, old if reference is None else reference, config.kl_estimator)

    counting = _kept_sequences(batch, config)
    kept, kept_lengths = spread(counting, lengths), torch.where(counting, lengths, 0)
    policy = reduced(select(surrogate, kept), kept_lengths, config)
    terms: dict[str, Term] = {"policy": policy}
    if config.beta and reference is not None and not config.kl_in_reward:
        terms["kl"] = reduced(select(kl, kept), kept_lengths, config).scaled(config.beta)
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
            "sampler_ratio_mean": Mean(0.0, 0) if weights is None else Mean.of(weights),
            "planning_fraction": Mean(0.0, 0) if planning is None else Mean.of(planning),
        },
    )


def _planning(batch: Batch, config: GRPOConfig) -> Tensor | None:
    """``[T]`` bool: the tokens whose advantages are amplified; None where the batch marks none."""
    if "planning_mask" not in batch.fields and config.planning_alpha and "planning_alpha" in config.model_fields_set:
        raise BatchError(
            "planning_alpha needs planning_mask, which says of each response token whether it plans",
            field="planning_mask",
            rule="given with planning_alpha",
        )
    return batch.get("planning_mask")


def _reward_metrics(batch: Batch) -> dict[str, Metric]:
    """NaN where the batch has advantages and no rewards."""
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


def _uncertain(entropy: Tensor, share: float) -> Tensor:
    """``[T]`` bool: the share of the batch's tokens that has the highest entropy.

    Wang et al. 2025, Beyond the 80/20 Rule, arXiv 2506.01939.
    """
    if share == 1 or not len(entropy):
        return torch.ones_like(entropy, dtype=torch.bool)
    return entropy >= torch.quantile(entropy, 1 - share)


def _surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor, uncertain: Tensor, config: GRPOConfig
) -> tuple[Tensor, Tensor]:
    """``[T], [T] bool``: the loss of each token, 0 of those that are not uncertain, and whether a clip is active there.

    GMPO's, of a whole response, is that of its uncertain tokens.
    """
    if config.surrogate == "gmpo":
        return geometric_surrogate(logprobs - old, advantages, lengths, *config.clip_range, uncertain)
    losses, clipped = _token_surrogate(logprobs, old, advantages, lengths, config)
    return torch.where(uncertain, losses, 0.0), clipped


def _token_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor, config: GRPOConfig
) -> tuple[Tensor, Tensor]:
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    if config.surrogate == "reinforce":
        return -advantages * logprobs, nothing
    if config.importance == "sequence":
        mean = sequence_log_ratio(logprobs, old, lengths)
        ratio = probability_ratio(mean, torch.zeros_like(mean))
    elif config.importance == "sequence_token":
        ratio = own_gradient_ratio(logprobs, sequence_log_ratio(logprobs, old, lengths))
    elif config.importance == "trajectory":
        whole = spread(segment_sum(logprobs - old, lengths), lengths)
        ratio = probability_ratio(whole, torch.zeros_like(whole))
    else:
        ratio = probability_ratio(logprobs, old)
    if config.surrogate == "cispo":
        return weighted_surrogate(ratio, logprobs, advantages, config.ratio_min, config.ratio_max)
    if config.surrogate == "sapo":
        return soft_surrogate(ratio, advantages, config.sapo_temperature_pos, config.sapo_temperature_neg), nothing
    low, high = config.clip_range
    return clipped_surrogate(ratio, advantages, 1 - low, 1 + high, config.dual_clip)


def _sampler_weights(batch: Batch, old: Tensor, config: GRPOConfig) -> Tensor | None:
    """``[T]``: truncated or masked importance weights between the trainer's and the sampler's log-probabilities.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    if config.sampler_correction is None:
        return None
    sampler = batch.get("sampler_log_probs")
    if sampler is None:
        raise BatchError(
            "sampler_correction needs sampler_log_probs, the log-probabilities that the sampler gave with its tokens",
            field="sampler_log_probs",
            rule="given with sampler_correction",
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


def _kept_sequences(batch: Batch, config: GRPOConfig) -> Tensor:
    """``[S]`` bool, on the host: which responses count."""
    given = batch.host
    kept = torch.ones(batch.num_sequences, dtype=torch.bool)
    if config.mask_zero_spread and "advantages" not in batch.fields:
        kept &= spread(group_spread(given["rewards"], batch.group_sizes)[2], batch.group_sizes)
    if config.mask_truncated and "truncated" in batch.fields:
        kept &= ~given["truncated"]
    elif config.mask_truncated and "mask_truncated" in config.model_fields_set:  # asked for, and no mere default
        raise BatchError(
            "mask_truncated needs truncated, which says of each response whether it was cut off",
            field="truncated",
            rule="given with mask_truncated",
        )
    return kept
