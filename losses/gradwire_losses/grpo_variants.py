"""Named objectives that are ``grpo`` with other defaults.

They accept every argument of ``grpo``. ``B`` prompts, ``S`` responses of all prompts, ``T`` scored tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import GROUP_POLICY_FIELDS
from gradwire_losses.group_config import GRPOConfig
from gradwire_losses.grpo import GRPO_METRICS, GRPO_WHOLE_BATCH, grpo, grpo_scores, grpo_streams
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import register_loss


def variant(name: str, description: str, *, reference: str, formula: str, **defaults: Any) -> None:
    """Register ``grpo`` under another name, with other defaults of its arguments, or other fields.

    Args:
        name: The wire name.
        description: Its docstring, whose first paragraph a list of the losses shows.
        reference, formula: The same as for every loss.
        defaults: New defaults of arguments of ``grpo``: a value, or a pydantic ``Field`` in place of its own.
    """
    fields: dict[str, Any] = {}
    for argument, default in defaults.items():
        field = GRPOConfig.model_fields[argument]
        if isinstance(default, FieldInfo):
            fields[argument] = (field.annotation, default)
            continue
        fields[argument] = (Annotated[field.annotation, *field.metadata, Field(description=field.description)], default)

    def objective(batch: Batch, scores: Scores, config: GRPOConfig) -> LossOutput:
        return grpo(batch, scores, config)

    objective.__name__ = objective.__qualname__ = name
    objective.__doc__ = description
    title = "".join(word.capitalize() for word in name.split("_")) + "Config"
    register_loss(
        name,
        config=create_model(title, __base__=GRPOConfig, __doc__=f"Arguments of ``{name}``.", **fields),
        layout="groups",
        fields=GROUP_POLICY_FIELDS,
        scores=grpo_scores,
        metrics=GRPO_METRICS,
        reference=reference,
        formula=formula,
        streams=grpo_streams,
        whole_batch=GRPO_WHOLE_BATCH,
    )(objective)


variant(
    "dr_grpo",
    """GRPO without its two biases: no standard deviation in the advantage, one divisor for responses of any length.

    With the default ``reduction``, ``"fixed"``, ``reduction_divisor`` is required: the maximum number of tokens of a
    response, the same in every call.""",
    reference="Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783)",
    formula="1/S sum_i 1/L sum_t max(-r_it A_i, -clip(r_it) A_i), A_i = R_i - mean_group R, L = reduction_divisor",
    scale_rewards=False,
    reduction="fixed",
    reduction_divisor=Field(
        None,
        gt=0,
        description='required with reduction "fixed", the default here: the maximum number of tokens of a '
        "response, the same in every call",
    ),
    beta=0.0,
)

variant(
    "dapo",
    """GRPO with a higher upper clip, a mean over tokens, and only complete responses and groups whose rewards differ.

    Responses marked ``truncated`` and groups of equal rewards are excluded from sum and mean (overlong filtering and
    dynamic sampling; the client samples other groups in their place). The soft penalty on long responses is part of the
    rewards.""",
    reference="Yu et al. 2025, DAPO (arXiv 2503.14476)",
    formula="1/T sum_t max(-r_t A, -clip(r_t, 1-eps_low, 1+eps_high) A), over responses that count",
    clip_epsilon_high=0.28,
    reduction="token_mean",
    mask_truncated=True,
    mask_zero_spread=True,
    beta=0.0,
)

variant(
    "group_gspo",
    """GRPO with one ratio per response, the geometric mean of its tokens' ratios. As a sum with ``target_tokens``:
    ``gspo``.""",
    reference="Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071)",
    formula="1/S sum_i max(-s_i A_i, -clip(s_i, 1-eps_low, 1+eps_high) A_i), s_i = exp(mean_t log r_it)",
    importance="sequence",
    clip_epsilon=3e-4,
    clip_epsilon_high=4e-4,
    beta=0.0,
)

variant(
    "gspo_token",
    """GSPO in which tokens have their response's ratio and their own gradient: advantages may differ by token.""",
    reference="Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071), section 4.3",
    formula="1/S sum_i 1/|o_i| sum_t max(-s_it A_it, -clip(s_it) A_it), s_it = sg(s_i) p_it / sg(p_it)",
    importance="sequence_token",
    clip_epsilon=3e-4,
    clip_epsilon_high=4e-4,
    beta=0.0,
)

variant(
    "gmpo",
    """GRPO with a geometric instead of an arithmetic mean over tokens, so that outliers of the ratio count less.

    ``clip_epsilon`` bounds the log-ratio (nats), token by token.
    """,
    reference="Zhao et al. 2025, Geometric-Mean Policy Optimization (arXiv 2507.20673)",
    formula="-1/S sum_i exp(mean_t clip(log r_it)) A_i, clipped to [-eps, eps] on the side that A_i pushes to",
    surrogate="gmpo",
    clip_epsilon=0.4,
    beta=0.0,
)

variant(
    "sapo",
    """GRPO with a soft gate instead of the clip: gradients fade with the distance from the old policy.""",
    reference="Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv 2511.20347)",
    formula="-1/S sum_i 1/|o_i| sum_t 4/tau sigmoid(tau (r_it - 1)) A_i, tau by the sign of A_i",
    surrogate="sapo",
    beta=0.0,
)

variant(
    "group_cispo",
    """CISPO over groups: the clipped ratio is a weight without gradient, so no token is left out.

    The bounds are those of the ratio itself, as in TRL. As a sum with ``target_tokens``: ``cispo``.
    """,
    reference="MiniMax-M1 2025 (arXiv 2506.13585)",
    formula="-1/T sum_t sg(clip(r_t, ratio_min, ratio_max)) A log p_t",
    surrogate="cispo",
    reduction="token_mean",
    beta=0.0,
)

variant(
    "rloo",
    """REINFORCE on whole responses; the baseline is the mean reward of the other responses to the same prompt.

    The KL to the reference is part of the reward. A group of one response has advantage 0.
    """,
    reference="Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740)",
    formula=(
        "1/S sum_i max(-r_i A_i, -clip(r_i) A_i), A_i = R_i - mean of the others' R, r_i = prod_t r_it, "
        "R_i minus beta sum_t (log p_old - log ref)"
    ),
    baseline="leave_one_out",
    scale_rewards=False,
    importance="trajectory",
    kl_in_reward=True,
    kl_estimator="k1",
    beta=0.05,
)

variant(
    "opo",
    """Policy gradient with the baseline of least variance, the group's length-weighted mean reward; on-policy.

    On-policy (without ``old_log_probs``) every ratio is 1, as in the paper.
    """,
    reference="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585)",
    formula="1/T sum_t max(-r_t A_i, -clip(r_t) A_i), A_i = R_i - sum_j |o_j| R_j / sum_j |o_j|",
    baseline="length_weighted",
    scale_rewards=False,
    reduction="token_mean",
    beta=0.0,
)

variant(
    "gpg",
    """Plain policy gradient over groups: no ratio, no clip, no KL; groups of equal rewards are excluded from the mean.

    Excluding them is the paper's factor alpha, which compensates for samples without gradient. With
    ``mask_zero_spread=False`` and ``advantage_scale="spread"`` the factor multiplies the advantages instead, counted
    by responses; with ``"nonzero"`` it is verl's.
    """,
    reference="Chu et al. 2025, GPG (arXiv 2504.02546)",
    formula="-1/T' sum_t A_i log p_t over the T' tokens of groups that differ, A_i = R_i - mean_group R",
    surrogate="reinforce",
    scale_rewards=False,
    mask_zero_spread=True,
    reduction="token_mean",
    beta=0.0,
)

variant(
    "vespo",
    """GRPO with a smooth weight of a whole response's ratio instead of the clip: 1 on-policy, fading on both sides.

    The weight has no gradient. With ``sampler_correction`` the ratio is relative to the sampler's probabilities.
    """,
    reference="VESPO: Variational Sequence-Level Soft Policy Optimization 2026 (arXiv 2602.10693)",
    formula="-1/T sum_t phi(w_i) A_i log p_t, phi(w) = e^lambda w^k e^(-lambda w), w_i = prod_t r_it",
    surrogate="vespo",
    reduction="token_mean",
    beta=0.0,
)

variant(
    "dppo_tv",
    """GRPO within a trust region of the probability itself: rare tokens are not clipped only because of a large ratio.

    ``clip_epsilon`` bounds the difference of a token's probabilities (the total variation of the two-point
    distribution).
    """,
    reference="Rethinking the Trust Region in LLM Reinforcement Learning 2026 (arXiv 2602.04879)",
    formula=(
        "-1/T sum_t m_t sg(min(r_t, ratio_max)) A log p_t, m_t = 0 where p_t - p_old,t is beyond clip_epsilon in "
        "the direction of A"
    ),
    surrogate="dppo_tv",
    ratio_max=20.0,
    reduction="token_mean",
    beta=0.0,
)

variant(
    "dppo_kl",
    """Like ``dppo_tv``, with the KL (nats) of the two-point distribution as the divergence.""",
    reference="Rethinking the Trust Region in LLM Reinforcement Learning 2026 (arXiv 2602.04879)",
    formula=(
        "-1/T sum_t m_t sg(min(r_t, ratio_max)) A log p_t, m_t = 0 where the two-point KL(p_old,t || p_t) is "
        "above clip_epsilon in the direction of A"
    ),
    surrogate="dppo_kl",
    ratio_max=20.0,
    reduction="token_mean",
    beta=0.0,
)

variant(
    "clip_cov",
    """GRPO that preserves entropy: some tokens whose probability and advantage covary strongly have no gradient.

    ``cov_seed`` selects them, so that the same batch gives the same loss.
    """,
    reference="Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning (arXiv 2505.22617)",
    formula=(
        "1/T sum_t m_t max(-r_t A, -clip(r_t) A), m_t = 0 for a share of the tokens whose "
        "(A_t - mean A)(log p_t - mean log p) is within cov_min ... cov_max"
    ),
    surrogate="clip_cov",
    reduction="token_mean",
    beta=0.0,
)

variant(
    "topr",
    """Off-policy REINFORCE that stays stable without a KL: only bad responses have an importance ratio, 1 at most.

    A is the reward minus the group's mean; give the paper's rewards of 1 and -1, without a baseline, as
    ``advantages``.
    """,
    reference="Le Roux et al. 2025, Tapered Off-Policy REINFORCE (arXiv 2503.14286)",
    formula="-1/S sum_i w_i A_i sum_t log p_it, w_i = 1 where A_i >= 0, else min(prod_t r_it, 1)",
    surrogate="topr",
    scale_rewards=False,
    reduction="sequence_mean_token_sum",
    beta=0.0,
)

variant(
    "kl_cov",
    """GRPO without a clip that preserves entropy by a penalty on the tokens that covary most with their advantage.""",
    reference="Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning (arXiv 2505.22617)",
    formula=(
        "1/T sum_t [-r_t A + c_t |log r_t|], c_t = kl_cov_coef for the cov_share of tokens with the highest "
        "(A_t - mean A)(log p_t - mean log p), else 0"
    ),
    surrogate="kl_cov",
    reduction="token_mean",
    beta=0.0,
)

variant(
    "reinforce_plus_plus_baseline",
    """REINFORCE++ with a baseline: rewards minus their group's mean, then whitened over all tokens of the batch.""",
    reference="Hu et al. 2025, REINFORCE++ (arXiv 2501.03262)",
    formula="1/T sum_t [max(-r_t A_t, -clip(r_t) A_t) + beta KL_t], A = (R_i - mean_group R) whitened over tokens",
    scale_rewards=False,
    whiten_advantages=True,
    reduction="token_mean",
    kl_estimator="k2",
)
