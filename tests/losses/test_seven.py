"""The seven losses of the service against plain references, by gradient check, in parts, and on hard rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError, Scores
from gradwire_losses.registry import get_loss
from support import loss_references as plain
from support.loss_properties import PROPERTIES
from support.losses import (
    Case,
    Columns,
    bits,
    column,
    group_columns,
    logps,
    numbers,
    pair_columns,
    per_row,
    read,
    row_columns,
    values_of,
)


def supervised(rng: np.random.Generator) -> Columns:
    return row_columns(rng)


def weighted(rng: np.random.Generator) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    weights = [[abs(w) for w in row] for row in numbers(rng, ids)]
    weights[3][-1] = 0.0
    return columns | {"weights": weights}


def prompted(rng: np.random.Generator) -> Columns:
    columns = row_columns(rng)
    del columns["loss_mask"]
    lengths = [min(len(row), int(rng.integers(0, 4))) for row in columns["input_ids"]]
    lengths[2] = len(columns["input_ids"][2])
    return columns | {"prompt_lengths": lengths}


def labelled(rng: np.random.Generator) -> Columns:
    columns = row_columns(rng)
    mask = columns.pop("loss_mask")
    rows = zip(columns["input_ids"], mask, strict=True)
    return columns | {"labels": [[token if on else -100 for token, on in zip(*row, strict=True)] for row in rows]}


def trajectories(rng: np.random.Generator, *fields: str) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    every = {
        "old_log_probs": logps(rng, ids, 0.5, -1.4),
        "rewards": numbers(rng, ids),
        "row_rewards": per_row(rng, len(ids)),
        "values": numbers(rng, ids),
        "old_values": numbers(rng, ids),
        "bootstrap_values": per_row(rng, len(ids)),
        "ref_log_probs": logps(rng, ids, 0.5, -1.4),
        "advantages": numbers(rng, ids),
        "row_advantages": per_row(rng, len(ids)),
    }
    columns |= {name: every[name] for name in ("old_log_probs", "rewards", *fields)}
    for name in ("rewards", "advantages"):
        if f"row_{name}" in columns:
            columns[name] = columns.pop(f"row_{name}")
    return columns


def advantaged(rng: np.random.Generator, *fields: str) -> Columns:
    """With advantages and no rewards."""
    return {name: rows for name, rows in trajectories(rng, *fields).items() if name != "rewards"}


def groups(rng: np.random.Generator, *fields: str) -> Columns:
    columns = group_columns(rng)
    return columns | {name: logps(rng, columns["response_ids"], 0.5, -1.4) for name in fields}


def off_policy(rng: np.random.Generator, behavior: str, weight: str, level: str) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    columns["behavior_log_probs"] = (
        logps(rng, ids, 0.5, -1.4) if behavior == "tokens" else logps(rng, [0] * len(ids), 2.0, -5.0)
    )
    return columns | {weight: numbers(rng, ids) if level == "tokens" else per_row(rng, len(ids))}


def preferences(rng: np.random.Generator, ref: str = "") -> Columns:
    columns = pair_columns(rng)
    for side in ("chosen", "rejected") if ref else ():
        ids = columns[f"{side}_input_ids"]
        own = logps(rng, ids, 0.5, -1.4) if ref == "tokens" else logps(rng, [0] * len(ids), 2.0, -5.0)
        columns[f"{side}_ref_log_probs"] = own
    return columns


def rewarded_pairs(rng: np.random.Generator, *, margins: bool = False) -> Columns:
    columns = {name: rows for name, rows in pair_columns(rng).items() if name.endswith("input_ids")}
    return columns | ({"margin": per_row(rng, 6)} if margins else {})


BASE = {"reference_model": "base"}


def case(loss: str, build: Any, reference: Any, label: str = "", headless: bool = False, **kwargs: Any) -> Case:
    return Case(loss, build, kwargs, reference, label, frozenset({"values"} if headless else ()))


CASES = [
    case("causal_lm", supervised, plain.causal_lm),
    case("causal_lm", labelled, plain.causal_lm, "labels"),
    case("causal_lm", prompted, plain.causal_lm, "prompts"),
    case("causal_lm", supervised, plain.causal_lm, "smoothed", label_smoothing=0.1),
    *(
        case("causal_lm", weighted, plain.causal_lm, f"weighted-{reduction}", reduction=reduction, **more)
        for reduction, more in [
            ("token_mean", {}),
            ("sequence_mean", {"label_smoothing": 0.2}),
            ("sequence_mean_token_sum", {}),
            ("sum", {}),
            ("fixed", {"reduction_divisor": 3.0}),
        ]
    ),
    replace(case("causal_lm", weighted, plain.causal_lm, "dft", loss_type="dft"), gradcheck=False),
    case("enhanced_ppo", lambda r: trajectories(r), plain.ppo, "head"),
    case("enhanced_ppo", lambda r: trajectories(r, "old_values"), plain.ppo, "reference", **BASE, beta=0.3),
    case("enhanced_ppo", lambda r: trajectories(r, "values"), plain.ppo, "values", headless=True),
    case("enhanced_ppo", lambda r: trajectories(r, "values"), plain.ppo, "values-and-head", clip_value_loss=False),
    case(
        "enhanced_ppo",
        lambda r: trajectories(r, "old_values", "row_rewards", "bootstrap_values"),
        plain.ppo,
        "bootstrap",
        use_gae=False,
        entropy_coef=0.0,
        value_clip_epsilon=0.4,
    ),
    case(
        "enhanced_ppo",
        lambda r: trajectories(r, "ref_log_probs"),
        plain.ppo,
        "kl-in-reward",
        kl_in_reward=True,
        kl_estimator="k1",
        beta=0.5,
        dual_clip=1.5,
        clip_epsilon_high=0.3,
    ),
    case("enhanced_ppo", lambda r: trajectories(r, "old_values"), plain.ppo, "as-estimated", whiten_advantages=False),
    case("enhanced_ppo", lambda r: advantaged(r, "advantages"), plain.ppo, "advantages", headless=True),
    case("enhanced_ppo", lambda r: advantaged(r, "row_advantages"), plain.ppo, "row-advantages"),
    case(
        "enhanced_ppo",
        lambda r: trajectories(r, "advantages", "ref_log_probs"),
        plain.ppo,
        "advantages-and-rewards",
        headless=True,
        kl_target=0.1,
    ),
    case("enhanced_ppo", lambda r: trajectories(r, "advantages"), plain.ppo, "advantages-and-critic"),
    *(
        case(
            "enhanced_ppo",
            lambda r: trajectories(r, "old_values"),
            plain.ppo,
            reduction,
            whiten_advantages=False,
            reduction=reduction,
            **more,
        )
        for reduction, more in [
            ("sequence_mean", {}),
            ("sequence_mean_token_sum", BASE),
            ("sum", {"value_loss_coef": 0.0}),
            ("fixed", {"reduction_divisor": 7.0}),
        ]
    ),
    case("conservative_ppo", lambda r: trajectories(r, "old_values"), plain.conservative_ppo, "reference", **BASE),
    case(
        "conservative_ppo",
        lambda r: trajectories(r),
        plain.conservative_ppo,
        "old-policy",
        conservative_coef=2.0,
        max_kl_divergence=0.001,
    ),
    case("conservative_ppo", lambda r: trajectories(r), plain.conservative_ppo, "within", max_kl_divergence=100.0),
    case("grpo", lambda r: groups(r, "old_log_probs"), plain.grpo, "reference", **BASE, beta=0.2),
    case("grpo", lambda r: groups(r), plain.grpo, "on-policy", entropy_coef=0.1),
    case(
        "grpo",
        lambda r: groups(r, "old_log_probs", "ref_log_probs"),
        plain.grpo,
        "dr-like",
        scale_rewards=False,
        reduction="fixed",
        reduction_divisor=5.0,
        kl_estimator="k2",
        dual_clip=2.0,
    ),
    case(
        "grpo",
        lambda r: groups(r, "old_log_probs"),
        plain.grpo,
        "tokens",
        reduction="token_mean",
        clip_epsilon_high=0.28,
    ),
    *(
        case(
            "importance_sampling",
            lambda r, b=behavior, w=weight, lv=level: off_policy(r, b, w, lv),
            plain.importance_sampling,
            f"{behavior}-{weight}-{level}",
            clip_ratio=1.5,
            **more,
        )
        for behavior in ("rows", "tokens")
        for weight, more in (("rewards", {}), ("advantages", BASE))
        for level in ("rows", "tokens")
    ),
    case("dpo", preferences, plain.dpo, "reference", **BASE),
    case("dpo", lambda r: preferences(r, "rows"), plain.dpo, "given", beta=0.5, label_smoothing=0.1),
    case("dpo", lambda r: preferences(r, "tokens"), plain.dpo, "given-tokens", beta=0.5),
    case("reward_modeling", rewarded_pairs, plain.reward_modeling),
    case(
        "reward_modeling",
        lambda r: rewarded_pairs(r, margins=True),
        plain.reward_modeling,
        "margins",
        margin=0.2,
        temperature=0.5,
        center_coef=0.1,
    ),
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    check(case, rng)


def test_the_metrics_of_the_service_are_there() -> None:
    promised = {
        "causal_lm": "perplexity num_tokens token_accuracy",
        "dpo": "implicit_reward chosen_reward rejected_reward reward_margin preference_accuracy",
        "enhanced_ppo": "policy_loss value_loss entropy kl_divergence approx_kl clip_fraction advantage_mean "
        "advantage_std explained_variance value_mean return_mean reward_mean",
        "grpo": "policy_loss entropy kl_divergence approx_kl clip_fraction advantage_mean advantage_std reward_mean "
        "group_reward_mean group_reward_std zero_spread_groups",
        "importance_sampling": "is_ratio_mean is_ratio_max is_ratio_min clipped_fraction",
        "conservative_ppo": "kl_violation kl_excess kl_penalty max_kl_threshold policy_loss value_loss",
        "reward_modeling": "preference_accuracy reward_margin chosen_reward_mean rejected_reward_mean "
        "chosen_reward_std rejected_reward_std",
    }
    for name, metrics in promised.items():
        assert set(metrics.split()) <= set(get_loss(name).metrics), name


def test_the_defaults_are_those_of_the_issue() -> None:
    ppo = get_loss("enhanced_ppo").config()
    expected = {"gamma": 0.99, "gae_lambda": 0.95, "clip_epsilon": 0.2, "value_loss_coef": 0.5, "entropy_coef": 0.01}
    assert expected.items() <= ppo.model_dump().items()
    assert ppo.whiten_advantages and get_loss("conservative_ppo").config().whiten_advantages
    assert ppo.beta == get_loss("grpo").config().beta == 0.01
    assert get_loss("dpo").config().beta == get_loss("importance_sampling").config().beta == 0.1
    assert get_loss("dpo").config().label_smoothing == 0
    conservative = get_loss("conservative_ppo").config()
    assert (conservative.conservative_coef, conservative.max_kl_divergence) == (0.1, 0.01)
    reward = get_loss("reward_modeling").config()
    assert (reward.margin, reward.temperature) == (0, 1)


@pytest.mark.parametrize("scale", [True, False])
def test_groups_of_equal_rewards_teach_nothing(rng: np.random.Generator, scale: bool) -> None:
    columns = group_columns(rng)
    columns["rewards"] = [[0.1] * len(samples) for samples in columns["rewards"]]
    drawn = Case("grpo", lambda _: columns, {"scale_rewards": scale}, plain.grpo).draw(rng)
    output = drawn.output()
    output.loss().backward()
    assert output.metrics["zero_spread_groups"].value() == 1.0
    assert output.metrics["group_reward_std"].value() == 0.0
    assert drawn.scores["logprobs"].grad is not None
    assert drawn.scores["logprobs"].grad.abs().max() == 0


def test_distant_policies_stay_finite_and_are_drawn_back(rng: np.random.Generator) -> None:
    ids = [[1, 2, 3]]
    columns = {
        "input_ids": ids,
        "old_log_probs": [[0.0, -400.0, -1.0]],
        "rewards": [[0.0, 1.0, -1.0]],
        "ref_log_probs": [[0.0, -1.0, -1.0]],
        "old_values": [[0.0, 0.0, 0.0]],
    }
    drawn = Case("enhanced_ppo", lambda _: columns, {"beta": 1.0}, plain.ppo).draw(rng)
    with torch.no_grad():
        drawn.scores["logprobs"].copy_(torch.tensor([-300.0, -900.0]))
    output = drawn.output()
    figures = {name: metric.value() for name, metric in output.metrics.items()}
    assert math.isnan(figures.pop("sampler_ratio_mean"))  # nothing asks for a correction
    assert all(map(math.isfinite, figures.values()))
    output.terms["kl"].sum.backward()
    assert (drawn.scores["logprobs"].grad < 0).all(), (
        "a descent step must raise tokens that the reference makes likelier"
    )


def test_importance_sampling_wants_rewards_or_advantages(rng: np.random.Generator) -> None:
    columns = {"input_ids": [[1, 2]], "behavior_log_probs": [-1.0]}
    with pytest.raises(BatchError) as caught:
        Case("importance_sampling", lambda _: columns, {}, plain.importance_sampling).draw(rng).output()
    assert (caught.value.field, caught.value.rule) == ("rewards", "rewards or advantages")


@pytest.mark.parametrize("level", ["rows", "tokens"])
def test_importance_sampling_uses_advantages_and_reports_rewards(level: str, rng: np.random.Generator) -> None:
    columns = off_policy(rng, "tokens", "advantages", level)
    rewards = per_row(rng, len(columns["input_ids"]))
    both = Case("importance_sampling", lambda _: columns | {"rewards": rewards}, {}, plain.importance_sampling)
    drawn = both.draw(rng)
    output, alone = drawn.output(), drawn.output(batch=read("importance_sampling", columns))
    assert output.loss().item() == alone.loss().item()
    counted = [reward for reward, n in zip(rewards, drawn.batch.row_lengths, strict=True) if n]
    assert output.metrics["reward_mean"].value() == pytest.approx(sum(counted) / len(counted))
    assert math.isnan(alone.metrics["reward_mean"].value())


def test_ppo_normalises_advantages_by_default_and_reports_both(rng: np.random.Generator) -> None:
    metrics = case("enhanced_ppo", lambda r: trajectories(r, "old_values"), plain.ppo).draw(rng).output().metrics
    assert metrics["advantage_std"].value() == pytest.approx(1.0)
    assert metrics["advantage_mean"].value() == pytest.approx(0.0, abs=1e-9)
    assert metrics["advantage_std_raw"].value() != pytest.approx(1.0)


def test_a_kl_violation_is_yes_or_no_and_its_excess_the_amount(rng: np.random.Generator) -> None:
    for bound, violated in ((1e-6, 1.0), (100.0, 0.0)):
        drawn = case("conservative_ppo", trajectories, plain.conservative_ppo, max_kl_divergence=bound).draw(rng)
        metrics = values_of(drawn.output().metrics)
        assert metrics["kl_violation"] == violated
        excess = max(0.0, metrics["kl_divergence"] - bound)
        assert metrics["kl_excess"] == pytest.approx(excess)
        assert metrics["kl_penalty"] == pytest.approx(0.1 * excess**2)


def test_rewards_or_advantages_are_needed_and_advantages_need_no_critic(rng: np.random.Generator) -> None:
    spec = get_loss("enhanced_ppo")
    config = spec.config()
    assert "values" in spec.scores(config, frozenset({"rewards"}))
    assert "values" not in spec.scores(config, frozenset({"rewards", "values"}))
    assert "values" not in spec.scores(config, frozenset({"advantages"}))
    with pytest.raises(BatchError, match="neither rewards nor advantages"):
        case("enhanced_ppo", lambda r: advantaged(r), plain.ppo).draw(rng).output()


def test_clip_ratio_is_no_distance_from_one() -> None:
    with pytest.raises(ValueError, match="clip_ratio"):
        get_loss("importance_sampling").config(clip_ratio=0.2)


def test_rewards_of_a_row_are_those_of_its_last_scored_token(rng: np.random.Generator) -> None:
    ids = [[1, 2, 3, 4], [5, 6]]
    base = {"input_ids": ids, "loss_mask": [[1, 1, 1, 0], [1, 1]], "old_log_probs": logps(rng, ids)}
    whole = Case("enhanced_ppo", lambda _: base | {"rewards": [2.0, 3.0]}, {}, plain.ppo).draw(rng)
    tokens = read("enhanced_ppo", base | {"rewards": [[9.0, 0.0, 2.0, 9.0], [9.0, 3.0]]})
    assert whole.output().loss().item() == whole.output(batch=tokens).loss().item()


def test_the_weights_of_dft_have_no_gradient(rng: np.random.Generator) -> None:
    drawn = case("causal_lm", supervised, plain.causal_lm, loss_type="dft").draw(rng)
    [grad] = torch.autograd.grad(drawn.output().loss(), drawn.scores["logprobs"])
    torch.testing.assert_close(grad, -drawn.scores["logprobs"].detach().exp() / drawn.batch.num_scored)


def test_a_negative_weight_is_told_by_row() -> None:
    batch = read("causal_lm", {"input_ids": [[1, 2], [3, 4, 5]], "weights": [[0.0, 1.0], [0.0, 1.0, -1.0]]})
    scores = Scores({"logprobs": -torch.ones(3), "correct": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(BatchError) as caught:
        get_loss("causal_lm").function(batch, scores, get_loss("causal_lm").config())
    assert (caught.value.field, caught.value.row, caught.value.rule) == ("weights", 1, "0 <= weight")


def test_columns_helper_matches_the_wire() -> None:
    nested = column([[[1, 2], []], [[3]]], np.int64)
    assert nested.values.tolist() == [1, 2, 3]
    assert [level.tolist() for level in nested.levels] == [[2, 1], [2, 0, 1]]
    assert len(bits(np.random.default_rng(0), [[1, 2], [3]])) == 2
