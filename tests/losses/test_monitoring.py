"""Warnings: silent in good health, one sentence with advice for each figure that left its range."""

from __future__ import annotations

import math

import pytest
from gradwire_losses.monitoring import FIRST_STEPS, PPO_HINTS, USUAL_RANGES, Advisor, usual_range_warnings
from gradwire_losses.registry import all_losses, get_loss
from support.losses import VOCAB  # importing it registers the losses

HEALTHY = {
    "loss": 0.3,
    "policy_loss": -0.01,
    "approx_kl": 0.01,
    "kl_divergence": 0.05,
    "clip_fraction": 0.1,
    "explained_variance": 0.6,
    "entropy": 0.8,
    "is_ratio_mean": 1.02,
    "is_ratio_max": 4.0,
    "zero_spread_groups": 0.3,
}


def test_a_run_in_good_health_is_told_nothing() -> None:
    assert usual_range_warnings(HEALTHY) == []
    assert usual_range_warnings(dict.fromkeys(HEALTHY, math.nan)) == []


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("approx_kl", 0.5, "fewer steps"),
        ("kl_divergence", 3.0, "beta"),
        ("clip_fraction", 0.9, "learning rate"),
        ("explained_variance", -2.0, "critic"),
        ("entropy", 0.0, "entropy_coef"),
        ("is_ratio_mean", 0.1, "temperature"),
        ("ratio_mean", 5.0, "temperature"),
        ("is_ratio_max", math.inf, "Truncate"),
        ("zero_spread_groups", 1.0, "prompts"),
    ],
)
def test_a_figure_out_of_range_comes_with_what_to_do(name: str, value: float, advice: str) -> None:
    [warning] = usual_range_warnings(HEALTHY | {name: value})
    assert warning.startswith(f"{name} is {value:.3g}, usually at")
    assert advice in warning


def test_every_range_is_of_a_metric_that_some_loss_returns() -> None:
    assert VOCAB
    returned = {metric for loss in all_losses() for metric in loss.metrics}
    assert set(USUAL_RANGES) <= returned


AIMED_AT = {
    "approx_kl": 0.01,
    "kl_divergence": 0.01,
    "clip_fraction": 0.2,
    "explained_variance": 0.8,
    "advantage_std": 1.0,
}


def hints(advisor: Advisor, step: int = FIRST_STEPS, **figures: float) -> list[str]:
    return advisor.hints("enhanced_ppo", PPO_HINTS, AIMED_AT | figures, step)


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("kl_divergence", 0.06, "learning_rate"),
        ("kl_divergence", 0.06, "beta"),
        ("clip_fraction", 0.05, "clip_epsilon"),
        ("clip_fraction", 0.35, "learning_rate"),
        ("explained_variance", 0.4, "value_loss_coef"),
        ("advantage_std", 3.0, "whiten_advantages"),
        ("advantage_std", 0.2, "whiten_advantages"),
    ],
)
def test_a_hint_names_the_setting_and_comes_once_a_spell(name: str, value: float, setting: str) -> None:
    advisor = Advisor()
    assert hints(advisor) == []
    assert hints(advisor, FIRST_STEPS - 1, **{name: value}) == []
    [hint] = hints(advisor, **{name: value})
    assert hint.startswith(f"{name} is {value:.3g}, usually at") and setting in hint
    assert hints(advisor, **{name: value}) == []
    assert hints(advisor, **{name: math.nan}) == []
    assert hints(advisor) == []  # the spell ends
    assert hints(advisor, **{name: value}) == [hint]


def test_a_fresh_batch_clips_nothing_and_that_is_no_hint() -> None:
    assert hints(Advisor(), clip_fraction=0.0, approx_kl=0.0) == []


def test_ppo_declares_the_documented_ranges() -> None:
    for name in ("enhanced_ppo", "conservative_ppo"):
        loss = get_loss(name)
        assert loss.hints == PPO_HINTS
        assert set(loss.hints) <= set(loss.metrics)
    bounds = {name: (each.low, each.high) for name, each in PPO_HINTS.items()}
    assert bounds["kl_divergence"][1] == 0.05 and bounds["clip_fraction"] == (0.1, 0.3)
    assert bounds["explained_variance"][0] == 0.5
