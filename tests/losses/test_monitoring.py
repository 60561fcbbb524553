"""Warnings: silent in good health, one sentence with advice for each figure that left its range."""

from __future__ import annotations

import math

import pytest
from gradwire_losses.monitoring import USUAL_RANGES, usual_range_warnings
from gradwire_losses.registry import all_losses
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
