"""Group relative policy optimisation: no critic, a group of responses to one prompt is its own baseline.

``B`` prompts, ``S`` responses of all prompts, ``T`` scored tokens of all responses.
"""

from __future__ import annotations

from pydantic import Field

from gradwire_losses.advantages import group_advantages, group_spread
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import GROUP_FIELDS
from gradwire_losses.kl import KLEstimator, kl_estimate
from gradwire_losses.outputs import LossOutput, Mean, Std, Term
from gradwire_losses.policy import clipped_surrogate, probability_ratio
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss


class GRPOConfig(PolicyConfig, ReductionConfig):
    """Arguments of ``grpo``."""

    beta: float = Field(
        0.01, ge=0, description="weight of the KL to the reference; with no reference there is no such term"
    )
    clip_epsilon: float = Field(0.2, gt=0, description="the ratio is clipped to 1 - clip_epsilon and 1 + it")
    clip_epsilon_high: float | None = Field(None, gt=0, description="upper side; clip_epsilon when None")
    dual_clip: float | None = Field(
        None, gt=1, description="where the advantage is negative, the ratio counts at most so"
    )
    scale_rewards: bool = Field(True, description="divide advantages by the group's standard deviation + 1e-4")
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    kl_estimator: KLEstimator = Field("k3", description="k1, k2 or k3: see gradwire_losses.kl")
    reduction: Reduction = Field(
        "sequence_mean", description="as the paper: mean over responses of the mean over tokens"
    )


GRPO_METRICS = {
    "policy_loss": "the clipped surrogate",
    "entropy": "mean entropy of a token's distribution (nats)",
    "kl_divergence": "mean KL of a token to the reference (nats); with no reference, to the policy of old_log_probs",
    "approx_kl": "mean KL of a token from the policy of old_log_probs to this one, by k3 (nats)",
    "clip_fraction": "share of tokens whose ratio is clipped: they give no gradient",
    "advantage_mean": "mean advantage of a response",
    "advantage_std": "its standard deviation",
    "reward_mean": "mean reward of a response",
    "group_reward_mean": "mean over groups of a group's mean reward",
    "group_reward_std": "mean over groups of the standard deviation of a group's rewards",
    "zero_spread_groups": "share of groups whose rewards are all equal: they teach nothing",
}


def grpo_scores(config: GRPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs", "entropy"}
    return frozenset(needed | {"ref_logprobs"} if computed_by_engine(config, present) else needed)


@register_loss(
    "grpo",
    config=GRPOConfig,
    layout="groups",
    fields=GROUP_FIELDS,
    scores=grpo_scores,
    metrics=GRPO_METRICS,
    reference="Shao et al. 2024, DeepSeekMath (arXiv 2402.03300)",
    formula="1/S sum_i 1/|o_i| sum_t [max(-r_it A_i, -clip(r_it, 1-eps, 1+eps) A_i) + beta KL_it], "
    "A_i = (R_i - mean_group R) / (std_group R + 1e-4)",
    streams=True,
)
def grpo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """Clipped surrogate whose advantage is a response's reward relative to the others' to its prompt.

    loss = policy_loss + beta * KL - entropy_coef * entropy, averaged as ``reduction`` says. A group of one response,
    or of equal rewards, has advantage 0. Without ``old_log_probs`` every ratio is 1: one step on fresh samples. A
    response with no scored token counts for its group's baseline and nowhere else.
    """
    lengths, rewards, reference = batch.row_lengths, batch["rewards"], reference_logprobs(batch, scores)
    old = batch.get("old_log_probs")
    if old is None:
        old = scores.logprobs.detach()
    mean, std, differ = group_spread(rewards, batch.group_sizes)
    advantages = group_advantages(rewards, batch.group_sizes, scale=config.scale_rewards)

    ratio = probability_ratio(scores.logprobs, old)
    high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
    per_token = advantages.repeat_interleave(lengths)
    surrogate, clipped = clipped_surrogate(ratio, per_token, 1 - config.clip_epsilon, 1 + high, config.dual_clip)
    kl = kl_estimate(scores.logprobs, old if reference is None else reference, config.kl_estimator)

    policy = reduced(surrogate, lengths, config)
    terms: dict[str, Term] = {"policy": policy}
    if config.beta and reference is not None:
        terms["kl"] = reduced(kl, lengths, config).scaled(config.beta)
    if config.entropy_coef:
        terms["entropy"] = reduced(scores.entropy, lengths, config).scaled(-config.entropy_coef)
    return LossOutput(
        terms,
        {
            "policy_loss": policy.metric(),
            "entropy": Mean.of(scores.entropy),
            "kl_divergence": Mean.of(kl),
            "approx_kl": Mean.of(kl_estimate(old, scores.logprobs, "k3")),
            "clip_fraction": Mean.of(clipped),
            "advantage_mean": Mean.of(advantages),
            "advantage_std": Std.of(advantages),
            "reward_mean": Mean.of(rewards),
            "group_reward_mean": Mean.of(mean),
            "group_reward_std": Mean.of(std),
            "zero_spread_groups": Mean.of(~differ),
        },
    )
