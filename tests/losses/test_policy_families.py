"""Tinker's losses, PPO's options, the REINFORCE family, GRPO's variants and distillation, as every loss is tested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import loss_references as seven
from support import policy_references as plain
from support.loss_properties import PROPERTIES
from support.losses import Case, row_columns
from support.policy_batches import (
    BASE,
    BOUNDS,
    RL,
    WAYS,
    case,
    failures,
    predictions,
    samples,
    teacher_columns,
    trajectories,
    unrewarded,
    unrewarded_samples,
)

CASES = [
    case("cross_entropy", lambda r: predictions(r, "weights"), plain.cross_entropy),
    case("cross_entropy", lambda r: predictions(r, "weights", candidates=3), plain.cross_entropy, "candidates"),
    case("importance_sampling", lambda r: predictions(r, *RL), plain.importance_sum, "targets"),
    case("importance_sampling", lambda r: predictions(r, *RL), plain.importance_sum, "targets-bounded", clip_ratio=1.5),
    case("ppo", lambda r: predictions(r, *RL), plain.tinker_policy("ppo")),
    case("ppo", lambda r: predictions(r, *RL), plain.tinker_policy("ppo"), "high", clip_high_threshold=1.28),
    case(
        "cispo", lambda r: predictions(r, *RL), plain.tinker_policy("cispo"), gradcheck=False, clip_high_threshold=1.2
    ),
    case("dro", lambda r: predictions(r, *RL), plain.tinker_policy("dro"), beta=0.3),
    case("gspo", lambda r: predictions(r, *RL), plain.tinker_policy("gspo"), gradcheck=False),
    case(
        "gspo",
        lambda r: predictions(r, *RL, "sequence_ratio_mask"),
        plain.tinker_policy("gspo"),
        "masked",
        gradcheck=False,
        clip_low_threshold=0.5,
        clip_high_threshold=2.0,
    ),
    *(
        case(
            loss, lambda r, f=fields, k=candidates: predictions(r, *f, candidates=k), reference, way["reduction"], **way
        )
        for loss, fields, candidates, reference in (
            ("cross_entropy", ("weights",), 3, plain.cross_entropy),
            ("importance_sampling", RL, 0, plain.importance_sum),
            ("ppo", RL, 0, plain.tinker_policy("ppo")),
            ("dro", RL, 0, plain.tinker_policy("dro")),
        )
        for way in WAYS
    ),
    *(
        case(loss, lambda r: predictions(r, *RL), plain.tinker_policy(loss), "means", gradcheck=False, **WAYS[1])
        for loss in ("cispo", "gspo")
    ),
    case("reinforce", lambda r: trajectories(r), plain.reinforce),
    case(
        "reinforce",
        lambda r: trajectories(r, "old_log_probs", by_row=True),
        plain.reinforce,
        "reference",
        **BASE,
        beta=0.4,
        gamma=0.9,
        baseline=0.3,
        entropy_coef=0.1,
        whiten_advantages=True,
    ),
    case("remax", lambda r: trajectories(r, "greedy_rewards", by_row=True), plain.reinforce, reduction="token_mean"),
    case("reinforce_plus_plus", lambda r: trajectories(r, "old_log_probs", "ref_log_probs"), plain.reinforce, beta=0.3),
    case("value_only", lambda r: trajectories(r, "old_values", "bootstrap_values", by_row=True), plain.value_only),
    case("value_only", lambda r: trajectories(r), plain.value_only, "whitened", whiten_rewards=True, use_gae=False),
    case(
        "enhanced_ppo",
        lambda r: trajectories(r, "old_log_probs", "ref_log_probs", "old_values"),
        seven.ppo,
        "whitened-rewards",
        whiten_rewards=True,
        whiten_advantages=False,
        kl_in_reward=True,
        kl_estimator="k1",
        beta=0.3,
    ),
    case(
        "enhanced_ppo",
        lambda r: trajectories(r, "old_log_probs", "ref_log_probs"),
        seven.ppo,
        "adaptive",
        kl_target=0.1,
        kl_horizon=50.0,
    ),
    case("dr_grpo", lambda r: samples(r, "old_log_probs"), plain.groups, reduction_divisor=7.0),
    case("dapo", lambda r: samples(r, "old_log_probs", "truncated"), plain.groups),
    case("dapo", lambda r: unrewarded_samples(r, "old_log_probs", "advantages"), plain.groups, "given"),
    case("dapo", lambda r: samples(r, "old_log_probs", "token_advantages"), plain.groups, "given-and-rewards"),
    case("group_gspo", lambda r: samples(r, "old_log_probs"), plain.groups),
    case(
        "group_gspo", lambda r: samples(r, "old_log_probs"), plain.groups, "wide", clip_epsilon=0.3, clip_epsilon_high=1
    ),
    case("gspo_token", lambda r: samples(r, "old_log_probs", "token_advantages"), plain.groups, gradcheck=False),
    case("gmpo", lambda r: samples(r, "old_log_probs"), plain.groups),
    case("gmpo", lambda r: samples(r, "old_log_probs"), plain.groups, "entropy-quantile", top_entropy_quantile=0.4),
    case("sapo", lambda r: samples(r, "old_log_probs"), plain.groups),
    case("group_cispo", lambda r: samples(r, "old_log_probs"), plain.groups, gradcheck=False, ratio_max=1.2),
    case("rloo", lambda r: samples(r, "old_log_probs", "ref_log_probs"), plain.groups, clip_epsilon=0.5),
    case("opo", lambda r: samples(r), plain.groups),
    case("gpg", lambda r: samples(r), plain.groups),
    case("gpg", lambda r: samples(r), plain.groups, "scaled", mask_zero_spread=False, advantage_scale="spread"),
    case("gpg", lambda r: failures(r), plain.groups, "nonzero", mask_zero_spread=False, advantage_scale="nonzero"),
    case("vespo", lambda r: samples(r, "old_log_probs"), plain.groups, gradcheck=False),
    case("vespo", lambda r: samples(r, "old_log_probs", "token_advantages"), plain.groups, "given", gradcheck=False),
    *(
        case(loss, lambda r: samples(r, "old_log_probs"), plain.groups, gradcheck=False, **BOUNDS)
        for loss in ("dppo_tv", "dppo_kl")
    ),
    case(
        "clip_cov",
        lambda r: samples(r, "old_log_probs"),
        plain.groups,
        gradcheck=False,
        cov_min=0.1,
        cov_max=0.6,
        cov_share=1.0,
    ),
    case("topr", lambda r: samples(r, "old_log_probs"), plain.groups, gradcheck=False),
    *(
        case(
            "grpo",
            lambda r: samples(r, "old_log_probs", "sampler_log_probs"),
            plain.groups,
            f"{mode}-normalised",
            sampler_correction=mode,
            sampler_normalize=True,
        )
        for mode in ("token_truncate", "sequence_mask")
    ),
    *(
        case(
            "dapo",
            lambda r: samples(r, "old_log_probs", "sampler_log_probs"),
            plain.groups,
            mode,
            sampler_rejection=mode,
            sampler_rejection_max=bound,
        )
        for mode, bound in (("seq_mean_k1", 1.3), ("seq_mean_k3", 0.15))
    ),
    case("kl_cov", lambda r: samples(r, "old_log_probs"), plain.groups, gradcheck=False, cov_share=0.2),
    case(
        "grpo",
        lambda r: samples(r, "old_log_probs", "ref_log_probs"),
        plain.groups,
        "bias-corrected-kl",
        beta=0.3,
        use_bias_correction_kl=True,
        kl_estimator="abs",
        scale_epsilon=1e-6,
    ),
    case("reinforce_plus_plus_baseline", lambda r: samples(r, "old_log_probs"), plain.groups, **BASE),
    case(
        "grpo",
        lambda r: samples(r, "old_log_probs", "ref_log_probs", "truncated"),
        plain.groups,
        "entropy-quantile",
        top_entropy_quantile=0.3,
        mask_truncated=True,
        beta=0.2,
        entropy_coef=0.1,
    ),
    case("grpo", lambda r: samples(r, "old_log_probs"), plain.groups, "batch-scale", scale_rewards="batch"),
    case("grpo", lambda r: samples(r, "old_log_probs", "advantages"), plain.groups, "given", dual_clip=1.5),
    case(
        "grpo",
        lambda r: samples(r, "old_log_probs", "ref_log_probs"),
        plain.groups,
        "k3-plus",
        gradcheck=False,
        kl_estimator="k3+",
    ),
    *(
        case(
            "grpo",
            lambda r: samples(r, "old_log_probs", "sampler_log_probs"),
            plain.groups,
            mode,
            sampler_correction=mode,
            sampler_ratio_max=1.5,
            sampler_ratio_min=0.5,
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    case("gigpo", lambda r: samples(r, "old_log_probs", "step_ids", "anchor_ids"), plain.gigpo),
    case(
        "gigpo",
        lambda r: samples(r, "step_ids", "anchor_ids", "step_rewards"),
        plain.gigpo,
        "step-rewards",
        step_weight=0.5,
        gamma=0.8,
        scale_rewards=False,
    ),
    case("gigpo", lambda r: samples(r, "old_log_probs", "token_advantages"), plain.gigpo, "given"),
    *(
        case(
            loss, lambda r, f=fields: samples(r, "old_log_probs", "planning_mask", *f), reference, "planning", **kwargs
        )
        for loss, fields, reference, kwargs in (
            ("grpo", (), plain.groups, {"scale_rewards": False}),
            ("grpo", ("token_advantages",), plain.groups, {"planning_alpha": 0.5, "dual_clip": 1.5}),
            ("dr_grpo", (), plain.groups, {"reduction_divisor": 7.0}),
            ("dapo", ("truncated",), plain.groups, {"planning_alpha": 1.0}),
            ("group_gspo", (), plain.groups, {"clip_epsilon": 0.3, "clip_epsilon_high": 1}),
            ("gmpo", (), plain.groups, {}),
            ("sapo", (), plain.groups, {}),
            ("rloo", (), plain.groups, {"clip_epsilon": 0.5}),
            ("opo", (), plain.groups, {}),
            ("gpg", (), plain.groups, {}),
            ("reinforce_plus_plus_baseline", (), plain.groups, {}),
            ("gigpo", ("step_ids", "anchor_ids"), plain.gigpo, {}),
        )
    ),
    *(
        case(loss, lambda r: samples(r, "old_log_probs", "planning_mask"), plain.groups, "planning", gradcheck=False)
        for loss in ("gspo_token", "group_cispo")
    ),
    case("gkd", row_columns, plain.gkd, **BASE),
    case("gkd", row_columns, plain.gkd, "sequences", **BASE, reduction="sequence_mean"),
    case("on_policy_distillation", lambda r: unrewarded(r, "old_log_probs"), plain.on_policy_distillation, **BASE),
    case(
        "on_policy_distillation",
        lambda r: unrewarded(r, "old_log_probs", "ref_log_probs"),
        plain.on_policy_distillation,
        "future",
        gamma=0.9,
        kl_coef=0.5,
    ),
    *(
        case("top_k_distillation", teacher_columns, plain.top_k_distillation, tail, tail=tail)
        for tail in ("bucket", "renormalise", "ignore")
    ),
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    check(case, rng)
