"""Charts of metrics: their axes, and which differences they show."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from gradwire.charts import chart, flat, text_of


def labels(drawn: str, axis: str) -> list[str]:
    return re.findall(f'<i class="{axis}"[^>]*>([^<]*)</i>', drawn)


@pytest.mark.parametrize(
    ("steps", "value", "x", "y"),
    [
        (range(61), lambda n: 1.6 - n / 100, ["0", "20", "40", "60"], ["1", "1.2", "1.4", "1.6"]),
        (range(3, 5), lambda n: n * 1e-4, ["3", "4"], ["0.0003", "0.00032", "0.00034", "0.00036", "0.00038", "0.0004"]),
        ([7], lambda _: 2.0, ["7"], ["0", "1", "2", "3", "4"]),
        (range(0, 100_001, 1000), lambda n: -n, ["0", "20,000", "40,000", "60,000", "80,000", "100,000"],
         ["-100000", "-80000", "-60000", "-40000", "-20000", "0"]),
    ],
)  # fmt: skip
def test_axes_have_few_round_ticks_and_whole_steps(
    steps: range, value: Callable[[int], float], x: list[str], y: list[str]
) -> None:
    drawn = chart("loss", {"": [(n, value(n)) for n in steps]})
    assert (labels(drawn, "x"), labels(drawn, "y")) == (x, y) and "<ul>" not in drawn


def test_curves_are_named_in_a_legend_and_their_names_are_texts() -> None:
    drawn = chart("<b>", {"<i>": [(0, 1.0), (1, 2.0)], "one": [(1, 1.5)], "none": []}, unit="nats")
    assert drawn.count("<polyline") == drawn.count("<li ") == 2 and drawn.count('class="dot"') == 1
    assert "<figcaption>&lt;b&gt; <small>nats</small>" in drawn and "&lt;i&gt;</li>" in drawn
    assert chart("loss", {"none": []}) == ""


@pytest.mark.parametrize(
    ("values", "axis", "reason"),
    [
        ([6.2225, 6.2227, 6.2226], (0, 20), "6.2225 to 6.2227, drawn flat"),
        ([3e-14, 0.0, 1e-14], (-1, 1), "at most 3e-14, drawn as 0"),
        ([1e-3] * 3, (0, 0.002), ""),
        ([-2.0] * 3, (-4, 0), ""),
        ([0.0] * 3, (-1, 1), ""),
    ],
)
def test_differences_of_rounding_are_drawn_flat_and_said(
    values: list[float], axis: tuple[float, float], reason: str
) -> None:
    level = flat([[[n, y] for n, y in enumerate(values)]], "approx_kl")
    assert level is not None and level.reason.startswith(reason) and bool(level.reason) == bool(reason)
    np.testing.assert_allclose((level.low, level.high), axis)


@pytest.mark.parametrize("values", [[6.2225, 6.2327], [1e-7, 2e-7], [2.0, -2.0], [0.0, 1e-9], []])
def test_what_differs_by_more_is_drawn_as_it_is(values: list[float]) -> None:
    assert flat([[[n, y] for n, y in enumerate(values)]], "learning_rate") is None


@pytest.mark.parametrize("metric", ["loss", "policy_loss"])
def test_a_policys_loss_of_nothing_but_rounding_is_drawn_flat(metric: str) -> None:
    level = flat([[[0, 2.7e-8], [1, -8.1e-8]]], metric)
    assert text_of(metric, -8.1e-8, 5) == "≈ 0" and text_of(metric, 2.7e-6, 5) == "2.7e-06"
    assert level is not None and level.reason.startswith("at most 8e-08, drawn as 0")
    assert flat([[[0, 2.7e-6], [1, -8.1e-6]]], metric) is None
