"""Arguments of the losses over groups of responses: those of ``grpo``, which its variants share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradwire_losses.kl import KL_ESTIMATORS, KLEstimator
from gradwire_losses.reduction import Reduction, ReductionConfig
from gradwire_losses.registry import PolicyConfig
from gradwire_losses.sampler import SamplerConfig

Surrogate = Literal[
    "clip", "cispo", "sapo", "gmpo", "reinforce", "vespo", "topr", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"
]


class GRPOConfig(SamplerConfig, PolicyConfig, ReductionConfig):
    """Arguments of ``grpo``."""

    beta: float = Field(
        0.01, ge=0, description="weight of the KL to the reference; without a reference the term is absent"
    )
    clip_epsilon: float = Field(0.2, gt=0, description="the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon")
    clip_epsilon_high: float | None = Field(None, gt=0, description="upper clip range; clip_epsilon if None")
    dual_clip: float | None = Field(
        None, gt=1, description="upper bound of the ratio for negative advantages (two-sided clip: delta)"
    )
    baseline: Literal["mean", "leave_one_out", "length_weighted"] = Field(
        "mean",
        description="baseline of a reward: the group's mean, the mean of the others, or the length-weighted mean",
    )
    scale_rewards: bool | Literal["batch"] = Field(
        True,
        description="divide advantages by the group's standard deviation + scale_epsilon, or by the whole \"batch\"'s",
    )
    scale_epsilon: float = Field(1e-4, ge=0, description="added to that deviation (verl: 1e-6)")
    advantage_scale: Literal["spread", "nonzero"] | None = Field(
        None,
        description="GPG's alpha: multiply advantages by the number of responses divided by the number in groups "
        'whose rewards differ ("spread"), or with a reward other than 0 ("nonzero", as verl)',
    )
    whiten_advantages: bool = Field(
        False, description="scale the tokens' advantages to mean 0 and variance 1 in the batch"
    )
    planning_alpha: float = Field(
        0.2,
        ge=0,
        le=1,
        description="with planning_mask: A becomes A + planning_alpha * |A| at planning tokens (HICRA), last of all",
    )
    importance: Literal["token", "sequence", "sequence_token", "trajectory"] = Field(
        "token",
        description="scope of the importance ratio. sequence: the geometric mean of its response's ratios (GSPO); "
        "sequence_token: that value with the token's own gradient; trajectory: their product",
    )
    surrogate: Surrogate = Field(
        "clip",
        description="clip: PPO's. cispo: the clipped ratio as a weight without gradient. sapo: a soft gate. gmpo: a "
        "response's geometric mean of clipped ratios. reinforce: log-probability times advantage, no ratio. vespo: a "
        "smooth weight of the response's ratio. topr: the response's ratio within 0 and 1 as a weight, where A < 0. "
        "dppo_tv, dppo_kl: the ratio as a weight, where a divergence of the "
        "token's probability is within clip_epsilon. clip_cov, kl_cov: tokens whose covariance of log-probability and "
        "advantage is high have no gradient, or a penalty",
    )
    ratio_min: float = Field(0.0, ge=0, description="for surrogate cispo: lower bound of the weight")
    ratio_max: float = Field(5.0, gt=0, description="for surrogates cispo and dppo: upper bound of the weight")
    vespo_k_pos: float = Field(2.0, ge=0, description="for surrogate vespo: power of the ratio where A >= 0")
    vespo_lambda_pos: float = Field(3.0, gt=0, description="for surrogate vespo: rate of its decay where A >= 0")
    vespo_k_neg: float = Field(3.0, ge=0, description="for surrogate vespo: power of the ratio where A < 0")
    vespo_lambda_neg: float = Field(2.0, gt=0, description="for surrogate vespo: rate of its decay where A < 0")
    cov_share: float = Field(
        2e-4, gt=0, le=1, description="for surrogates clip_cov and kl_cov: share of the batch's tokens, at least one"
    )
    cov_min: float = Field(1.0, description="for surrogate clip_cov: lower bound of the covariance of selected tokens")
    cov_max: float = Field(5.0, description="for surrogate clip_cov: upper bound of the covariance of selected tokens")
    cov_seed: int = Field(0, ge=0, description="for surrogate clip_cov: seed of the choice among them")
    kl_cov_coef: float = Field(
        1.0,
        ge=0,
        description="for surrogate kl_cov: weight of the absolute log-ratio; 1 as in "
        "the paper, while verl's default is 0.1",
    )
    sapo_temperature_pos: float = Field(
        1.0, gt=0, description="for surrogate sapo: temperature of the gate where A > 0"
    )
    sapo_temperature_neg: float = Field(
        1.05, gt=0, description="for surrogate sapo: temperature of the gate where A <= 0"
    )
    top_entropy_quantile: float = Field(
        1.0, gt=0, le=1, description="share of the batch's tokens, those of highest entropy, that have a policy loss"
    )
    mask_truncated: bool = Field(
        False, description="exclude responses marked truncated, except from their group's baseline"
    )
    mask_zero_spread: bool = Field(
        False,
        description="exclude groups whose rewards are all equal; advantages in the batch are all used",
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    kl_estimator: KLEstimator = Field("k3", description=KL_ESTIMATORS)
    use_bias_correction_kl: bool = Field(
        False, description="multiply each token's KL by its importance ratio: unbiased off-policy (DeepSeek-V3.2)"
    )
    kl_in_reward: bool = Field(
        False,
        description="subtract beta * (old_log_probs - reference's), summed over tokens, from each response's reward, "
        "without a KL term; advantages in the batch must then include it",
    )
    reduction: Reduction = Field("sequence_mean", description=ReductionConfig.model_fields["reduction"].description)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip range below and above 1 (for GMPO: below and above 0, of the log-ratio)."""
        return self.clip_epsilon, self.clip_epsilon if self.clip_epsilon_high is None else self.clip_epsilon_high
