"""Named objectives that are ``grpo`` with other defaults.

They accept every argument of ``grpo``. ``B`` prompts, ``S`` responses of all prompts, ``T`` scored tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import GROUP_POLICY_FIELDS
from gradwire_losses.group_config import GRPOConfig
from gradwire_losses.grpo import GRPO_METRICS, GRPO_WHOLE_BATCH, grpo, grpo_scores, grpo_streams
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import register_loss

variant = partial(
    register_loss,
    layout="groups",
    fields=GROUP_POLICY_FIELDS,
    scores=grpo_scores,
    metrics=GRPO_METRICS,
    streams=grpo_streams,
    whole_batch=GRPO_WHOLE_BATCH,
)


def with_defaults(name: str, **defaults: Any) -> type[GRPOConfig]:
    """``grpo``'s arguments with other defaults, or other fields."""
    fields: dict[str, Any] = {}
    for argument, default in defaults.items():
        if isinstance(default, FieldInfo):
            fields[argument] = (GRPOConfig.model_fields[argument].annotation, default)
            continue
        field = GRPOConfig.model_fields[argument]
        fields[argument] = (Annotated[field.annotation, *field.metadata, Field(description=field.description)], default)
    return create_model(name, __base__=GRPOConfig, __doc__=f"Arguments of ``grpo``: {name}.", **fields)


@variant(
    "dr_grpo",
    config=with_defaults(
        "DrGRPOConfig",
        scale_rewards=False,
        reduction="fixed",
        reduction_divisor=Field(
            None,
            gt=0,
            description='required with reduction "fixed", the default here: the maximum number of tokens of a '
            "response, the same in every call",
        ),
        beta=0.0,
    ),
    reference="Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783)",
    formula="1/S sum_i 1/L sum_t max(-r_it A_i, -clip(r_it) A_i), A_i = R_i - mean_group R, L = reduction_divisor",
)
def dr_grpo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO without its two biases: no standard deviation in the advantage, one divisor for responses of any length.

    With the default ``reduction``, ``"fixed"``, ``reduction_divisor`` is required: the maximum number of tokens of a
    response, the same in every call."""
    return grpo(batch, scores, config)


@variant(
    "dapo",
    config=with_defaults(
        "DAPOConfig",
        clip_epsilon_high=0.28,
        reduction="token_mean",
        mask_truncated=True,
        mask_zero_spread=True,
        beta=0.0,
    ),
    reference="Yu et al. 2025, DAPO (arXiv 2503.14476)",
    formula="1/T sum_t max(-r_t A, -clip(r_t, 1-eps_low, 1+eps_high) A), over responses that count",
)
def dapo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO with a higher upper clip, a mean over tokens, and only complete responses and groups whose rewards differ.

    Responses marked ``truncated`` and groups of equal rewards are excluded from sum and mean (overlong filtering and
    dynamic sampling; the client samples other groups in their place). The soft penalty on long responses is part of the
    rewards."""
    return grpo(batch, scores, config)


@variant(
    "group_gspo",
    config=with_defaults("GroupGSPOConfig", importance="sequence", clip_epsilon=3e-4, clip_epsilon_high=4e-4, beta=0.0),
    reference="Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071)",
    formula="1/S sum_i max(-s_i A_i, -clip(s_i, 1-eps_low, 1+eps_high) A_i), s_i = exp(mean_t log r_it)",
)
def group_gspo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO with one ratio per response, the geometric mean of its tokens' ratios. As a sum with ``target_tokens``:
    ``gspo``."""
    return grpo(batch, scores, config)


@variant(
    "gspo_token",
    config=with_defaults(
        "GSPOTokenConfig", importance="sequence_token", clip_epsilon=3e-4, clip_epsilon_high=4e-4, beta=0.0
    ),
    reference="Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071), section 4.3",
    formula="1/S sum_i 1/|o_i| sum_t max(-s_it A_it, -clip(s_it) A_it), s_it = sg(s_i) p_it / sg(p_it)",
)
def gspo_token(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GSPO in which tokens have their response's ratio and their own gradient: advantages may differ by token."""
    return grpo(batch, scores, config)


@variant(
    "gmpo",
    config=with_defaults("GMPOConfig", surrogate="gmpo", clip_epsilon=0.4, beta=0.0),
    reference="Zhao et al. 2025, Geometric-Mean Policy Optimization (arXiv 2507.20673)",
    formula="-1/S sum_i exp(mean_t clip(log r_it)) A_i, clipped to [-eps, eps] on the side that A_i pushes to",
)
def gmpo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO with a geometric instead of an arithmetic mean over tokens, so that outliers of the ratio count less.

    ``clip_epsilon`` bounds the log-ratio (nats), token by token.
    """
    return grpo(batch, scores, config)


@variant(
    "sapo",
    config=with_defaults("SAPOConfig", surrogate="sapo", beta=0.0),
    reference="Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv 2511.20347)",
    formula="-1/S sum_i 1/|o_i| sum_t 4/tau sigmoid(tau (r_it - 1)) A_i, tau by the sign of A_i",
)
def sapo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO with a soft gate instead of the clip: gradients fade with the distance from the old policy."""
    return grpo(batch, scores, config)


@variant(
    "group_cispo",
    config=with_defaults("GroupCISPOConfig", surrogate="cispo", reduction="token_mean", beta=0.0),
    reference="MiniMax-M1 2025 (arXiv 2506.13585)",
    formula="-1/T sum_t sg(clip(r_t, ratio_min, ratio_max)) A log p_t",
)
def group_cispo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """CISPO over groups: the clipped ratio is a weight without gradient, so no token is left out.

    The bounds are those of the ratio itself, as in TRL. As a sum with ``target_tokens``: ``cispo``.
    """
    return grpo(batch, scores, config)


@variant(
    "rloo",
    config=with_defaults(
        "RLOOConfig",
        baseline="leave_one_out",
        scale_rewards=False,
        importance="trajectory",
        kl_in_reward=True,
        kl_estimator="k1",
        beta=0.05,
    ),
    reference="Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740)",
    formula="1/S sum_i max(-r_i A_i, -clip(r_i) A_i), A_i = R_i - mean of the others' R, r_i = prod_t r_it, "
    "R_i minus beta sum_t (log p_old - log ref)",
)
def rloo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """REINFORCE on whole responses; the baseline is the mean reward of the other responses to the same prompt.

    The KL to the reference is part of the reward. A group of one response has advantage 0.
    """
    return grpo(batch, scores, config)


@variant(
    "opo",
    config=with_defaults(
        "OPOConfig", baseline="length_weighted", scale_rewards=False, reduction="token_mean", beta=0.0
    ),
    reference="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585)",
    formula="1/T sum_t max(-r_t A_i, -clip(r_t) A_i), A_i = R_i - sum_j |o_j| R_j / sum_j |o_j|",
)
def opo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """Policy gradient with the baseline of least variance, the group's length-weighted mean reward; on-policy.

    On-policy (without ``old_log_probs``) every ratio is 1, as in the paper.
    """
    return grpo(batch, scores, config)


@variant(
    "gpg",
    config=with_defaults(
        "GPGConfig",
        surrogate="reinforce",
        scale_rewards=False,
        mask_zero_spread=True,
        reduction="token_mean",
        beta=0.0,
    ),
    reference="Chu et al. 2025, GPG (arXiv 2504.02546)",
    formula="-1/T' sum_t A_i log p_t over the T' tokens of groups that differ, A_i = R_i - mean_group R",
)
def gpg(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """Plain policy gradient over groups: no ratio, no clip, no KL; groups of equal rewards are excluded from the mean.

    Excluding them is the paper's factor alpha, which compensates for samples without gradient. With
    ``mask_zero_spread=False`` and ``advantage_scale="spread"`` the factor multiplies the advantages instead, counted
    by responses; with ``"nonzero"`` it is verl's.
    """
    return grpo(batch, scores, config)


@variant(
    "vespo",
    config=with_defaults("VESPOConfig", surrogate="vespo", reduction="token_mean", beta=0.0),
    reference="VESPO: Variational Sequence-Level Soft Policy Optimization 2026 (arXiv 2602.10693)",
    formula="-1/T sum_t phi(w_i) A_i log p_t, phi(w) = e^lambda w^k e^(-lambda w), w_i = prod_t r_it",
)
def vespo(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO with a smooth weight of a whole response's ratio instead of the clip: 1 on-policy, fading on both sides.

    The weight has no gradient. With ``sampler_correction`` the ratio is relative to the sampler's probabilities.
    """
    return grpo(batch, scores, config)


@variant(
    "dppo_tv",
    config=with_defaults("DPPOTVConfig", surrogate="dppo_tv", ratio_max=20.0, reduction="token_mean", beta=0.0),
    reference="Rethinking the Trust Region in LLM Reinforcement Learning 2026 (arXiv 2602.04879)",
    formula="-1/T sum_t m_t sg(min(r_t, ratio_max)) A log p_t, m_t = 0 where p_t - p_old,t is beyond clip_epsilon in "
    "the direction of A",
)
def dppo_tv(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO within a trust region of the probability itself: rare tokens are not clipped only because of a large ratio.

    ``clip_epsilon`` bounds the difference of a token's probabilities (the total variation of the two-point
    distribution).
    """
    return grpo(batch, scores, config)


@variant(
    "dppo_kl",
    config=with_defaults("DPPOKLConfig", surrogate="dppo_kl", ratio_max=20.0, reduction="token_mean", beta=0.0),
    reference="Rethinking the Trust Region in LLM Reinforcement Learning 2026 (arXiv 2602.04879)",
    formula="-1/T sum_t m_t sg(min(r_t, ratio_max)) A log p_t, m_t = 0 where the two-point KL(p_old,t || p_t) is "
    "above clip_epsilon in the direction of A",
)
def dppo_kl(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """Like ``dppo_tv``, with the KL (nats) of the two-point distribution as the divergence."""
    return grpo(batch, scores, config)


@variant(
    "clip_cov",
    config=with_defaults("ClipCovConfig", surrogate="clip_cov", reduction="token_mean", beta=0.0),
    reference="Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning (arXiv 2505.22617)",
    formula="1/T sum_t m_t max(-r_t A, -clip(r_t) A), m_t = 0 for a share of the tokens whose "
    "(A_t - mean A)(log p_t - mean log p) is within cov_min ... cov_max",
)
def clip_cov(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO that preserves entropy: some tokens whose probability and advantage covary strongly have no gradient.

    ``cov_seed`` selects them, so that the same batch gives the same loss.
    """
    return grpo(batch, scores, config)


@variant(
    "kl_cov",
    config=with_defaults("KLCovConfig", surrogate="kl_cov", reduction="token_mean", beta=0.0),
    reference="Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning (arXiv 2505.22617)",
    formula="1/T sum_t [-r_t A + c_t |log r_t|], c_t = kl_cov_coef for the cov_share of tokens with the highest "
    "(A_t - mean A)(log p_t - mean log p), else 0",
)
def kl_cov(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """GRPO without a clip that preserves entropy by a penalty on the tokens that covary most with their advantage."""
    return grpo(batch, scores, config)


@variant(
    "reinforce_plus_plus_baseline",
    config=with_defaults(
        "ReinforcePlusPlusBaselineConfig",
        scale_rewards=False,
        whiten_advantages=True,
        reduction="token_mean",
        kl_estimator="k2",
    ),
    reference="Hu et al. 2025, REINFORCE++ (arXiv 2501.03262)",
    formula="1/T sum_t [max(-r_t A_t, -clip(r_t) A_t) + beta KL_t], A = (R_i - mean_group R) whitened over tokens",
)
def reinforce_plus_plus_baseline(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
    """REINFORCE++ with a baseline: rewards minus their group's mean, then whitened over all tokens of the batch."""
    return grpo(batch, scores, config)
