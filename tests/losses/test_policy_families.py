"""Tinker's losses, PPO's options, the REINFORCE family, GRPO's variants and distillation, as every loss is tested."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError
from gradwire_losses.registry import all_losses, get_loss
from support import loss_references as seven
from support import policy_references as plain
from support.loss_properties import PROPERTIES
from support.losses import (
    VOCAB,
    Case,
    Columns,
    Drawn,
    bits,
    group_columns,
    logps,
    numbers,
    per_row,
    read,
    row_columns,
    tokens,
)

BASE = {"reference_model": "base"}


def predictions(rng: np.random.Generator, *fields: str, candidates: int = 0) -> Columns:
    """Rows in Tinker's convention: every token is scored as far as the mask goes, the first one too."""
    columns = row_columns(rng)
    ids, mask = columns["input_ids"], columns.pop("loss_mask")
    mask[1] = [1]
    many = [[tokens(rng, candidates) for _ in row] for row in ids]
    columns |= {"target_tokens": many if candidates else [tokens(rng, len(row)) for row in ids], "mask": mask}
    every = {
        "weights": numbers(rng, columns["target_tokens"]),
        "logprobs": logps(rng, ids, 0.5, -1.4),
        "advantages": numbers(rng, ids),
        "sequence_ratio_mask": bits(rng, ids),
    }
    return columns | {name: every[name] for name in fields}


def teacher_columns(rng: np.random.Generator, k: int = 3) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    probabilities = rng.dirichlet([1.0] * (k + 1), sum(map(len, ids)))[:, :-1]
    logs = iter(np.log(np.maximum(probabilities, 1e-4)).astype(np.float32).tolist())
    return columns | {
        "teacher_token_ids": [[tokens(rng, k) for _ in row] for row in ids],
        "teacher_log_probs": [[next(logs) for _ in row] for row in ids],
    }


def trajectories(rng: np.random.Generator, *fields: str, by_row: bool = False) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    every = {
        "old_log_probs": logps(rng, ids, 0.5, -1.4),
        "ref_log_probs": logps(rng, ids, 0.5, -1.4),
        "old_values": numbers(rng, ids),
        "bootstrap_values": per_row(rng, len(ids)),
        "greedy_rewards": per_row(rng, len(ids)),
        "rewards": per_row(rng, len(ids)) if by_row else numbers(rng, ids),
    }
    return columns | {name: every[name] for name in ("rewards", *fields)}


def samples(rng: np.random.Generator, *fields: str) -> Columns:
    columns = group_columns(rng)
    responses = columns["response_ids"]
    every = {
        "planning_mask": bits(rng, responses, 0.4),
        "old_log_probs": logps(rng, responses, 0.5, -1.4),
        "ref_log_probs": logps(rng, responses, 0.5, -1.4),
        "sampler_log_probs": logps(rng, responses, 0.7, -1.4),
        "truncated": bits(rng, [[0] * len(group) for group in responses], 0.4),
        "advantages": numbers(rng, [[0] * len(group) for group in responses]),
        "token_advantages": numbers(rng, responses),
        "step_ids": [[np.sort(rng.integers(0, 3, len(r))).tolist() for r in group] for group in responses],
        "step_rewards": numbers(rng, responses),
    }
    every["anchor_ids"] = [
        [[int(rng.integers(0, 2)) + step for step in r] for r in group] for group in every["step_ids"]
    ]
    columns |= {name.removeprefix("token_"): every[name] for name in fields}
    return columns


def case(loss: str, build: Any, reference: Any, label: str = "", gradcheck: bool = True, **kwargs: Any) -> Case:
    return Case(loss, build, kwargs, reference, label, gradcheck=gradcheck)


RL = ("logprobs", "advantages")
WAYS: list[dict[str, Any]] = [
    {"reduction": "token_mean"},
    {"reduction": "sequence_mean"},
    {"reduction": "sequence_mean_token_sum"},
    {"reduction": "fixed", "reduction_divisor": 7.0},
]

BOUNDS = {"clip_epsilon": 0.05, "clip_epsilon_high": 0.08, "ratio_max": 1.3}

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
    case("dapo", lambda r: _unrewarded_samples(r, "old_log_probs", "advantages"), plain.groups, "given"),
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
    case("gpg", lambda r: _failures(r), plain.groups, "nonzero", mask_zero_spread=False, advantage_scale="nonzero"),
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
    case("on_policy_distillation", lambda r: _unrewarded(r, "old_log_probs"), plain.on_policy_distillation, **BASE),
    case(
        "on_policy_distillation",
        lambda r: _unrewarded(r, "old_log_probs", "ref_log_probs"),
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


def _unrewarded(rng: np.random.Generator, *fields: str) -> Columns:
    return {name: rows for name, rows in trajectories(rng, *fields).items() if name != "rewards"}


def _failures(rng: np.random.Generator) -> Columns:
    """Rewards of which some are 0."""
    columns = samples(rng)
    columns["rewards"] = [[max(0.0, reward) for reward in group] for group in columns["rewards"]]
    columns["rewards"][2] = [0.0, 1.0, 0.5]
    return columns


def _unrewarded_samples(rng: np.random.Generator, *fields: str) -> Columns:
    return {name: rows for name, rows in samples(rng, *fields).items() if name != "rewards"}


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    check(case, rng)


def gradient(drawn: Drawn, name: str = "logprobs") -> torch.Tensor:
    drawn.output().loss().backward()
    found = drawn.scores[name].grad
    assert found is not None
    return found


# ------------------------------------------------------------------ gradients of losses that hold a part constant


def test_cispo_gives_every_token_its_weighted_gradient(rng: np.random.Generator) -> None:
    drawn = case("cispo", lambda r: predictions(r, *RL), None, clip_high_threshold=1.2).draw(rng)
    ratio = (drawn.scores["logprobs"].detach() - drawn.batch["logprobs"]).exp()
    torch.testing.assert_close(gradient(drawn), -ratio.clamp(0, 1.2) * drawn.batch["advantages"])


def test_cispo_over_groups_gives_every_token_its_weighted_gradient(rng: np.random.Generator) -> None:
    drawn = case("group_cispo", lambda r: samples(r, "old_log_probs", "advantages"), None, ratio_max=1.2).draw(rng)
    ratio = (drawn.scores["logprobs"].detach() - drawn.batch["old_log_probs"]).exp()
    expected = -ratio.clamp(0, 1.2) * drawn.batch.per_token("advantages") / drawn.batch.num_scored
    torch.testing.assert_close(gradient(drawn), expected)


def test_gspo_gives_tokens_their_own_gradient_times_the_row_ratio(rng: np.random.Generator) -> None:
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    drawn = case("gspo", lambda r: predictions(r, *RL), None, **wide).draw(rng)
    difference = drawn.scores["logprobs"].detach() - drawn.batch["logprobs"]
    ratio = torch.cat([row.mean().exp().expand(len(row)) for row in difference.split(drawn.batch.row_lengths.tolist())])
    torch.testing.assert_close(gradient(drawn), -ratio * drawn.batch["advantages"])


def test_gspo_token_with_one_advantage_a_response_has_gspos_gradient(rng: np.random.Generator) -> None:
    """As the paper says of equation (13): with a response's advantage on every token the two are the same."""
    columns = samples(rng, "old_log_probs")
    seed = int(rng.integers(1 << 31))
    both = []
    for name in ("group_gspo", "gspo_token"):
        drawn = case(name, lambda _: columns, None, clip_epsilon=0.9, clip_epsilon_high=50).draw(
            np.random.default_rng(seed)
        )
        both.append(gradient(drawn))
    torch.testing.assert_close(*both)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(rng: np.random.Generator) -> None:
    from gradwire_losses.kl import kl_estimate

    logprobs = torch.from_numpy(rng.normal(-1, 0.5, 9)).requires_grad_()
    ref = torch.from_numpy(rng.normal(-1, 0.5, 9))
    for plus, value in (("k3+", "k3"), ("k1+", "k1")):
        estimate = kl_estimate(logprobs, ref, plus)  # type: ignore[arg-type]
        torch.testing.assert_close(estimate, kl_estimate(logprobs, ref, value))  # type: ignore[arg-type]
        [found] = torch.autograd.grad(estimate.sum(), logprobs)
        torch.testing.assert_close(found, (logprobs - ref).detach())


# ------------------------------------------------------------------ conventions and pitfalls


def test_an_entry_of_targets_is_about_what_follows_its_token(rng: np.random.Generator) -> None:
    batch = read("ppo", {"input_ids": [[5, 6, 7], [8]], "target_tokens": [[6, 7, 9], [3]], "mask": [[0, 1, 1], [1]],
                         "logprobs": [[9.0, -1.0, -2.0], [-3.0]], "advantages": [[9.0, 1.0, 2.0], [3.0]]})  # fmt: skip
    assert batch.read_positions.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [7, 9, 3]
    assert batch["logprobs"].tolist() == [-1.0, -2.0, -3.0]
    part = batch.select(torch.tensor([1, 0]))
    assert part.targets.tolist() == [3, 7, 9]
    assert part.read_positions.tolist() == [0, 2, 3]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_prompts_placeholders_are_as_good_as_a_mask(loss: str, rng: np.random.Generator) -> None:
    """Tinker's batches have 0 for the log-probabilities and advantages of a prompt, and no mask."""
    columns = {
        "input_ids": [[5, 6, 7, 8]],
        "target_tokens": [[6, 7, 8, 9]],
        "logprobs": [[0.0, 0.0, -1.0, -2.0]],
        "advantages": [[0.0, 0.0, 1.0, 2.0]],
    }
    if loss == "importance_sampling":
        columns["ref_log_probs"] = [[-9.0, -9.0, -1.0, -1.5]]
    drawn = case(loss, lambda _: columns, None).draw(rng)
    placeholders, found = drawn.output(), gradient(drawn)
    masked = drawn.output(
        batch=read(loss, columns | {"mask": [[0, 0, 1, 1]]}), scores={"logprobs": drawn.scores["logprobs"][2:]}
    )
    assert placeholders.loss().item() == pytest.approx(masked.loss().item())
    mine, other = ({name: metric.value() for name, metric in o.metrics.items()} for o in (placeholders, masked))
    assert mine == pytest.approx(other, nan_ok=True)
    assert found[:2].tolist() == [0.0, 0.0]


def test_token_aligned_rows_are_read_one_token_before(rng: np.random.Generator) -> None:
    batch = read("causal_lm", {"input_ids": [[5, 6, 7], [8], [1, 2]], "loss_mask": [[1, 0, 1], [1], [1, 1]]})
    assert batch.own_positions.tolist() == [2, 5]
    assert batch.read_positions.tolist() == [1, 4]
    assert batch.targets.tolist() == [7, 2]


@pytest.mark.parametrize(
    "loss,changes,field",
    [
        ("ppo", {"target_tokens": [[1], [2]]}, "target_tokens"),
        ("ppo", {"target_tokens": [[1, VOCAB], [2]]}, "target_tokens"),
        ("ppo", {"logprobs": [[math.nan, -1.0], [-1.0]]}, "logprobs"),
        ("cross_entropy", {"weights": [[[1.0], [1.0]], [[1.0]]]}, "weights"),
        ("importance_sampling", {"loss_mask": [[1, 1], [1]]}, "loss_mask"),
        ("importance_sampling", {"behavior_log_probs": [[-1.0, -1.0], [-1.0]]}, "behavior_log_probs"),
        ("importance_sampling", {"logprobs": None}, "logprobs"),
        ("importance_sampling", {"target_tokens": None, "mask": [[1, 1], [1]]}, "mask"),
        ("importance_sampling", {"target_tokens": None}, "behavior_log_probs"),
    ],
)
def test_a_batch_of_targets_that_breaks_a_rule_is_named(
    rng: np.random.Generator, loss: str, changes: dict[str, Any], field: str
) -> None:
    columns = {"input_ids": [[1, 2], [3]], "target_tokens": [[2, 4], [5]]}
    columns |= (
        {"weights": [[1.0, 1.0], [1.0]]}
        if loss == "cross_entropy"
        else {
            "logprobs": [[-1.0, -1.0], [-1.0]],
            "advantages": [[1.0, 1.0], [1.0]],
        }
    )
    columns = {name: rows for name, rows in (columns | changes).items() if rows is not None}
    with pytest.raises(BatchError) as caught:
        Case(loss, lambda _: columns, {}, None).draw(rng).output()  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_target_of_no_weight_may_be_impossible(rng: np.random.Generator) -> None:
    columns = {"input_ids": [[1, 2]], "target_tokens": [[2, 3]], "weights": [[0.0, 2.0]]}
    drawn = Case("cross_entropy", lambda _: columns, {}, None).draw(rng)  # type: ignore[arg-type]
    with torch.no_grad():
        drawn.scores["logprobs"].copy_(torch.tensor([-math.inf, -1.5]))
    assert drawn.output().loss().item() == 3.0
    assert gradient(drawn).tolist() == [0.0, -2.0]


def test_planning_tokens_gain_more_from_success_and_lose_less_by_failure(rng: np.random.Generator) -> None:
    columns = {
        "prompt_ids": [[1]],
        "response_ids": [[[2, 3], [4, 5]]],
        "rewards": [[1.0, 0.0]],
        "planning_mask": [[[1, 0], [1, 0]]],
    }
    drawn = case("grpo", lambda _: columns, None, scale_rewards=False, reduction="sum").draw(rng)
    torch.testing.assert_close(gradient(drawn), torch.tensor([-0.6, -0.5, 0.4, 0.5], dtype=torch.float64))
    assert drawn.output().metrics["planning_fraction"].value() == 0.5


def test_every_group_loss_of_a_policy_takes_a_planning_mask() -> None:
    takers = {spec.name for spec in all_losses() if any(f.name == "planning_mask" for f in spec.fields)}
    policies = {spec.name for spec in all_losses() if spec.layout == "groups" and not spec.head}
    assert takers == policies and {"grpo", "dapo", "gigpo", "gmpo", "rloo"} <= takers


def test_an_amplification_that_is_asked_for_needs_its_mask(rng: np.random.Generator) -> None:
    with pytest.raises(BatchError, match="planning_alpha needs planning_mask"):
        case("dapo", lambda r: samples(r), None, planning_alpha=0.2).draw(rng).output()
    case("dapo", lambda r: samples(r), None, planning_alpha=0.0).draw(rng).output()


def test_truncated_responses_and_level_groups_count_nowhere_in_dapo(rng: np.random.Generator) -> None:
    """Taking them out of the batch gives the same loss, as long as baselines stay."""
    columns = samples(rng, "old_log_probs", "truncated")
    drawn = case("dapo", lambda _: columns, None).draw(rng)
    kept = drawn.output()
    masked = columns | {
        "response_masks": [
            [[0] * len(m) if cut or len(set(rewards)) < 2 else m for m, cut in zip(group, cuts, strict=True)]
            for group, cuts, rewards in zip(
                columns["response_masks"], columns["truncated"], columns["rewards"], strict=True
            )
        ],
        "truncated": [[0] * len(group) for group in columns["truncated"]],
    }
    batch = read(drawn.spec, masked)
    index = torch.tensor(
        [
            bool(on)
            for before, after in zip(columns["response_masks"], masked["response_masks"], strict=True)
            for old, new in zip(before, after, strict=True)
            for was, on in zip(old, new, strict=True)
            if was
        ]
    )
    scores = {name: values[index] for name, values in drawn.scores.items()}
    other = drawn.output(batch=batch, scores=scores)
    assert other.loss().item() == pytest.approx(kept.loss().item(), rel=1e-9)
    assert other.terms["policy"].count == kept.terms["policy"].count


def test_a_group_of_one_response_has_no_advantage(rng: np.random.Generator) -> None:
    for name in ("grpo", "rloo", "opo", "dr_grpo", "group_gspo"):
        more = {"reduction_divisor": 4.0} if name == "dr_grpo" else {}
        columns = {"prompt_ids": [[1]], "response_ids": [[[2, 3]]], "response_masks": [[[1, 1]]], "rewards": [[5.0]]}
        drawn = case(name, lambda _, c=columns: c, None, **more).draw(rng)
        assert gradient(drawn).abs().max() == 0, name


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [({"mask_truncated": True}, "truncated"), ({"sampler_correction": "token_mask"}, "sampler_log_probs")],
)
def test_an_option_that_lacks_its_field_says_which(
    kwargs: dict[str, Any], field: str, rng: np.random.Generator
) -> None:
    with pytest.raises(BatchError, match=f"needs {field}") as caught:
        case("grpo", lambda r: samples(r), None, **kwargs).draw(rng).output()
    assert caught.value.field == field
    case("dapo", lambda r: samples(r), None).draw(rng).output()  # there it is a default: nothing was cut off


def test_dr_grpo_asks_for_its_divisor() -> None:
    described = get_loss("dr_grpo").config.model_json_schema()["properties"]
    assert described["reduction"]["default"] == "fixed" and "paper" not in described["reduction"]["description"]
    assert described["reduction_divisor"]["description"].startswith("required")
    with pytest.raises(ValueError, match="reduction_divisor"):
        get_loss("dr_grpo").config()


def test_dapo_with_advantages_of_its_own_counts_groups_of_equal_rewards(rng: np.random.Generator) -> None:
    columns = samples(rng, "old_log_probs", "advantages")
    columns["rewards"] = [[1.0] * len(group) for group in columns["rewards"]]
    output = case("dapo", lambda _: columns, None).draw(rng).output()
    assert math.isfinite(output.metrics["policy_loss"].value())
    assert output.metrics["kept_fraction"].value() == 1.0


def test_groups_need_rewards_or_advantages(rng: np.random.Generator) -> None:
    with pytest.raises(BatchError, match="neither rewards nor advantages") as caught:
        case("grpo", lambda r: _unrewarded_samples(r), None).draw(rng).output()
    assert caught.value.field == "rewards"


def test_the_next_beta_follows_the_kl(rng: np.random.Generator) -> None:
    """Above the target it grows by at most a fifth over the horizon, below it falls, without a target it stays."""
    for target, change in ((1e-6, 0.2), (1e6, -0.2), (None, 0.0)):
        drawn = case(
            "enhanced_ppo",
            lambda r: trajectories(r, "old_log_probs", "ref_log_probs"),
            None,
            kl_target=target,
            kl_horizon=60.0,
        ).draw(rng)
        rows = int((drawn.batch.row_lengths > 0).sum())
        assert drawn.output().metrics["next_beta"].value() == pytest.approx(0.01 * (1 + change * rows / 60))


def test_a_teacher_whose_tokens_add_up_to_more_than_one_is_refused(rng: np.random.Generator) -> None:
    columns = {"input_ids": [[1, 2]], "teacher_token_ids": [[[1, 2], [3, 4]]], "teacher_log_probs": [[[0.0, 0.0]] * 2]}
    with pytest.raises(BatchError, match="renormalise"):
        case("top_k_distillation", lambda _: columns, None).draw(rng).output()
    assert math.isfinite(
        case("top_k_distillation", lambda _: columns, None, tail="renormalise").draw(rng).output().loss().item()
    )


def test_distilling_a_teacher_with_nothing_left_over_is_finite(rng: np.random.Generator) -> None:
    half = math.log(0.5)
    columns = {
        "input_ids": [[1, 2]],
        "teacher_token_ids": [[[1, 2], [3, 4]]],
        "teacher_log_probs": [[[half, half]] * 2],
    }
    drawn = case("top_k_distillation", lambda _: columns, None).draw(rng)
    with torch.no_grad():
        drawn.scores["candidate_logprobs"].fill_(half)
    found = gradient(drawn, "candidate_logprobs")
    assert drawn.output().loss().item() == pytest.approx(0.0, abs=1e-6)
    assert found.isfinite().all()
