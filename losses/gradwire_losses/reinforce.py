"""REINFORCE and its variants on single responses. ``T`` scored tokens, ``S`` rows.

Variants whose baseline is a group of responses to one prompt are options and variants of ``grpo``: ``rloo``, ``opo``,
``gpg``, ``reinforce_plus_plus_baseline``.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import Tensor

from gradwire_losses.advantages import rewards_to_go, whiten
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.critic import reward_mean, token_rewards
from gradwire_losses.fields import (
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    ROWS_OR_TOKENS,
    SAMPLER_LOG_PROBS,
    row_field,
)
from gradwire_losses.kl import kl_estimate
from gradwire_losses.outputs import LossOutput, Mean, Std, Term
from gradwire_losses.policy import clipped_surrogate, probability_ratio
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss
from gradwire_losses.sampler import SAMPLER_METRICS, sampler_metrics


class ReinforceConfig(PolicyConfig, ReductionConfig):
    """Arguments of ``reinforce``."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    baseline: float = Field(0.0, description="number subtracted from every return, such as a running mean of rewards")
    whiten_advantages: bool = Field(False, description="scale the batch's advantages to mean 0 and variance 1")
    beta: float = Field(
        0.01, ge=0, description="beta * (old_log_probs - reference's) is subtracted from each token's reward"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    reduction: Reduction = Field(
        "sequence_mean_token_sum", description="as in the paper: mean over rows of the sum over tokens"
    )


FIELDS = (
    INPUT_IDS,
    LOSS_MASK,
    row_field("rewards", ROWS_OR_TOKENS, "Reward for each token; a row's reward is for its last token.", required=True),
    replace(
        OLD_LOG_PROBS,
        required=False,
        description="Log-probability of each token under the policy that wrote it; if absent, the current policy.",
    ),
    REF_LOG_PROBS,
    SAMPLER_LOG_PROBS,
)
METRICS = {
    "policy_loss": "the surrogate",
    "entropy": "mean entropy per token (nats)",
    "kl_divergence": "mean KL per token to the reference (nats), by k3; without a reference, to the policy of "
    "old_log_probs",
    "approx_kl": "mean KL per token from the policy of old_log_probs to the current one, by k3 (nats)",
    "clip_fraction": "share of tokens whose loss a bound of the ratio decides; 0 without clipping",
    "advantage_mean": "mean advantage per token before whitening",
    "advantage_std": "standard deviation of the advantages",
    "return_mean": "mean over tokens of the rewards to go, minus the KL penalty",
    "reward_mean": "mean over rows of the row's total reward",
    **SAMPLER_METRICS,
}


def _scores(config: ReinforceConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs", "entropy"}
    return frozenset(needed | {"ref_logprobs"} if computed_by_engine(config, present) else needed)


WHOLE_BATCH = "mean and variance of the advantages, with whiten_advantages"


def _streams(config: ReinforceConfig, present: frozenset[str]) -> bool:
    return not config.whiten_advantages


def _objective(
    batch: Batch, scores: Scores, config: ReinforceConfig, baseline: Tensor | float, clip: float | None
) -> LossOutput:
    """The objective with a baseline (a number, or ``[T]``), and with PPO's clipped ratio if ``clip`` is given."""
    lengths, reference, logprobs = batch.row_lengths, reference_logprobs(batch, scores), scores.logprobs
    old_logprobs = batch.get("old_log_probs")
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    rewards = token_rewards(batch)
    shaped = rewards if reference is None else rewards - config.beta * (old - reference)
    returns = rewards_to_go(shaped, lengths, config.gamma)
    advantages = returns - baseline
    weight = whiten(advantages) if config.whiten_advantages else advantages
    if clip is None:
        surrogate, clipped = -weight * logprobs, weight.new_zeros(len(weight))
    else:
        surrogate, clipped = clipped_surrogate(probability_ratio(logprobs, old), weight, 1 - clip, 1 + clip)
    policy = reduced(surrogate, lengths, config)
    terms: dict[str, Term] = {"policy": policy}
    if config.entropy_coef:
        terms["entropy"] = reduced(scores.entropy, lengths, config).scaled(-config.entropy_coef)
    return LossOutput(
        terms,
        {
            "policy_loss": policy.metric(),
            "entropy": Mean.of(scores.entropy),
            "kl_divergence": Mean.of(kl_estimate(logprobs, old if reference is None else reference, "k3")),
            "approx_kl": Mean.of(kl_estimate(old, logprobs, "k3")),
            "clip_fraction": Mean.of(clipped),
            "advantage_mean": Mean.of(advantages),
            "advantage_std": Std.of(advantages),
            "return_mean": Mean.of(returns),
            "reward_mean": reward_mean(batch),
            **sampler_metrics(batch, logprobs, old_logprobs),
        },
        weight,
    )


@register_loss(
    "reinforce",
    config=ReinforceConfig,
    fields=FIELDS,
    scores=_scores,
    metrics=METRICS,
    reference="Williams 1992, Simple Statistical Gradient-Following Algorithms",
    formula="-1/S sum_i sum_t (G_it - b) log p_it, G_t = sum_u>=t gamma^(u-t) r_u",
    streams=_streams,
    whole_batch=WHOLE_BATCH,
)
def reinforce(batch: Batch, scores: Scores, config: ReinforceConfig) -> LossOutput:
    """The policy gradient: each token's log-probability weighted by its rewards to go.

    On-policy: ``old_log_probs`` enter only the KL in the reward and the metrics. For samples of another
    policy see ``importance_sampling``.
    """
    return _objective(batch, scores, config, config.baseline, None)


@register_loss(
    "remax",
    config=ReinforceConfig,
    fields=(
        *FIELDS,
        row_field("greedy_rewards", ("[rows]",), "Reward of the greedy response to the same prompt.", required=True),
    ),
    scores=_scores,
    metrics=METRICS,
    reference="Li et al. 2023, ReMax (arXiv 2310.10505)",
    formula="-1/S sum_i sum_t (G_it - R_greedy) log p_it",
    streams=_streams,
    whole_batch=WHOLE_BATCH,
)
def remax(batch: Batch, scores: Scores, config: ReinforceConfig) -> LossOutput:
    """REINFORCE with the reward of the greedy response as the baseline."""
    greedy = batch.per_token("greedy_rewards")
    return _objective(batch, scores, config, greedy + config.baseline, None)


class ReinforcePlusPlusConfig(ReinforceConfig):
    """Arguments of ``reinforce_plus_plus``."""

    clip_epsilon: float = Field(0.2, gt=0, description="the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon")
    whiten_advantages: bool = Field(True, description="scale the batch's advantages to mean 0 and variance 1")
    reduction: Reduction = Field("token_mean", description="mean over tokens")


@register_loss(
    "reinforce_plus_plus",
    config=ReinforcePlusPlusConfig,
    fields=FIELDS,
    scores=_scores,
    metrics=METRICS,
    reference="Hu et al. 2025, REINFORCE++ (arXiv 2501.03262)",
    formula="1/T sum_t max(-r_t A_t, -clip(r_t) A_t), A the returns of rewards - beta (log p_old - log ref), whitened",
    streams=_streams,
    whole_batch=WHOLE_BATCH,
)
def reinforce_plus_plus(batch: Batch, scores: Scores, config: ReinforcePlusPlusConfig) -> LossOutput:
    """PPO without a critic: returns with a KL in every token's reward, whitened over the batch, and a clipped ratio."""
    return _objective(batch, scores, config, config.baseline, config.clip_epsilon)
