"""Statistics against plain float64 references, and against what they promise."""

from __future__ import annotations

import itertools
import math

import krippendorff
import numpy as np
import pytest
from gradwire_feedback.statistics.agreement import agreement
from gradwire_feedback.statistics.distribution import distribution
from gradwire_feedback.statistics.sample_ratio import sample_ratio_p_value
from gradwire_feedback.statistics.user_effects import (
    Interval,
    Scores,
    boundary,
    contrast,
    difference_interval,
    effective_users,
    mean_interval,
)
from numpy.typing import NDArray
from support.ab_tests import DIFFERENT, EQUAL, Scenario, simulate


def reference_difference(scores: Scores) -> tuple[float, float]:
    """Least squares with a dummy for each block, and how the sum behind it varies with the draw, by Monte Carlo.

    The scores stay, as they do where versions are equal; each user draws a place anew, which says the version by the
    deployment's share.
    """
    blocks, seen = [], dict[int, int]()
    for deployment in scores.deployments.tolist():
        blocks.append((deployment, seen.get(deployment, 0) // 100))
        seen[deployment] = seen.get(deployment, 0) + 1
    names = sorted(set(blocks))
    dummies = np.array([[float(block == name) for name in names] for block in blocks])
    beta, *_ = np.linalg.lstsq(
        np.column_stack([(scores.versions == 1).astype(float), dummies]), scores.values, rcond=None
    )
    residuals = scores.values - dummies @ np.linalg.lstsq(dummies, scores.values, rcond=None)[0]
    places = np.random.default_rng(0).random((20_000, int(scores.users.max()) + 1))[:, scores.users]
    sums = (places < np.array([scores.weights[n][1] for n in scores.deployments.tolist()])) @ residuals
    return float(beta[0]), float(sums.var())


@pytest.mark.parametrize(
    "scenario", [Scenario(300, 1), Scenario(40, 4, 0.1, 10, shares=(0.1, 0.5, 0.9), spread=0.2, drift=True)], ids=str
)
def test_the_difference_is_least_squares_and_its_variance_that_of_the_draw(scenario: Scenario) -> None:
    scores = scenario.draw(np.random.default_rng(3))
    difference, variance = reference_difference(scores)
    found = contrast(scores, 0, 1)
    assert found.difference == pytest.approx(difference, abs=1e-9)
    assert found.variance(0.0) == pytest.approx(variance, rel=0.04)
    shifted = Scores(
        scores.values - 0.3 * (scores.versions == 1), scores.users, scores.versions, scores.deployments, scores.weights
    )
    assert contrast(shifted, 0, 1).variance(0.0) == pytest.approx(found.variance(0.3), rel=1e-9)
    span = difference_interval(scores, 0, 1, 0.05)[1]
    for edge in (span.low, span.high):
        assert abs(found.total - edge * found.weight) == pytest.approx(boundary(found.variance(edge), 0.05), rel=1e-6)


def test_the_boundary_is_crossed_by_a_random_walk_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    walks = np.abs(np.cumsum(rng.normal(size=(400, 3000)), axis=1))
    bounds = np.array([boundary(float(n), 0.1) for n in range(1, 3001)])
    crossed = float(np.mean(np.any(walks > bounds, axis=1)))
    assert 0.03 < crossed <= 0.1


def test_too_few_users_settle_nothing() -> None:
    users = np.repeat(np.arange(38), 50)
    few = Scores((users % 2).astype(float), users, users % 2, np.zeros_like(users), {0: [0.5, 0.5]})
    assert difference_interval(few, 0, 1, 0.05) == (1.0, Interval(-1.0, 1.0))
    assert mean_interval(few, 0.05).high < 1.0 and mean_interval(few.only(0), 0.05) == Interval(0.0, 1.0)
    nobody = few.only(7)
    assert difference_interval(nobody, 0, 1, 0.05)[0] is None and mean_interval(nobody, 0.05) == Interval(0.0, 1.0)


def test_one_busy_user_counts_as_one() -> None:
    users = np.r_[np.zeros(10_000, np.int64), np.arange(1, 30)]
    assert effective_users(users) < 1.01 and effective_users(np.arange(30)) == pytest.approx(30)


SHORT = (
    Scenario(100, 6, shares=(0.1, 0.5), spread=0.2, drift=True),
    Scenario(400, 1, binary=True),
    Scenario(600, 1, 0.05, 15, shares=(0.1,), spread=0.2),
)


@pytest.mark.parametrize("scenario", SHORT, ids=str)
def test_equal_versions_rarely_have_a_winner_however_often_one_looks(scenario: Scenario) -> None:
    assert simulate(scenario, 60).settled <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", EQUAL, ids=str)
def test_a_thousand_tests_of_equal_versions_rarely_have_a_winner(scenario: Scenario) -> None:
    found = simulate(scenario, 1000)
    assert found.settled <= 0.055 and found.missed <= 0.055


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", DIFFERENT, ids=str)
def test_intervals_hold_a_real_difference(scenario: Scenario) -> None:
    found = simulate(scenario, 1000)
    assert found.missed <= 0.055
    if scenario.shares == (0.5,) and scenario.busy == 0:
        assert found.settled >= 0.8


def exact_bayes_factor(counts: tuple[int, ...], shares: tuple[float, ...]) -> float:
    """Product of the predictive probabilities of a Polya urn over those of the weights, a draw at a time."""
    factor, seen = 1.0, [0] * len(counts)
    for kind, count in enumerate(counts):
        for _ in range(count):
            factor *= (100 * shares[kind] + seen[kind]) / (100 + sum(seen)) / shares[kind]
            seen[kind] += 1
    return factor


@pytest.mark.parametrize("counts", [(0, 0), (5, 5), (30, 10), (90, 60), (1, 0)])
def test_the_sample_ratio_is_the_reciprocal_bayes_factor(counts: tuple[int, int]) -> None:
    for shares in ((0.5, 0.5), (0.9, 0.1)):
        expected = min(1.0, 1 / exact_bayes_factor(counts, shares))
        assert sample_ratio_p_value(counts, shares) == pytest.approx(expected, rel=1e-9)


def test_the_sample_ratio_rarely_raises_a_false_alarm_and_sees_a_real_loss() -> None:
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(300):
        drawn = np.cumsum(rng.random(400) < 0.3)
        p = [sample_ratio_p_value((int(k), n - int(k)), (0.3, 0.7)) for n, k in enumerate(drawn, 1)]
        alarms += min(p) < 0.05
    assert alarms / 300 <= 0.05
    assert sample_ratio_p_value((5000, 4400), (1.0, 1.0)) < 0.001
    assert sample_ratio_p_value((10**7, 10**7), (0.5, 0.5)) == 1.0


def test_agreement_is_krippendorffs() -> None:
    table = np.array([[0.0, 0.25, 0.5, np.nan, 1.0], [0.0, 0.5, 0.5, 0.75, 1.0], [np.nan, 0.25, np.nan, 0.75, 0.75]])
    assert agreement(table) == pytest.approx(reference_alpha(table), abs=1e-12)
    assert agreement(table) == pytest.approx(
        krippendorff.alpha(reliability_data=table, level_of_measurement="interval"), abs=1e-12
    )
    assert agreement(np.tile([0.0, 0.5, 1.0], (3, 1))) == pytest.approx(1.0)
    for undefined in (np.empty((0, 0)), np.full((2, 3), 0.5), np.array([[0.1, np.nan], [np.nan, 0.9]])):
        assert agreement(undefined) is None


def reference_alpha(table: NDArray[np.float64]) -> float:
    """One minus observed over expected squared difference, pair by pair."""
    units = [[v for v in column if not math.isnan(v)] for column in table.T]
    units = [unit for unit in units if len(unit) > 1]
    values = [v for unit in units for v in unit]
    observed = sum(
        sum((a - b) ** 2 for a, b in itertools.permutations(unit, 2)) / (len(unit) - 1) for unit in units
    ) / len(values)
    pairs = list(itertools.permutations(values, 2))
    return 1 - observed / (sum((a - b) ** 2 for a, b in pairs) / len(pairs))


@pytest.mark.parametrize(
    ("scores", "word"),
    [
        ([], "Too few"),
        ([0.1] * 9, "1 are missing"),
        ([0.5] * 60, "near 0.5"),
        ([0.9] * 60, "high"),
        ([0.1] * 60, "low"),
        ([0.0, 1.0] * 10, "50 or more"),
    ],
)
def test_the_advice_fits_the_scores(scores: list[float], word: str) -> None:
    assert any(word in sentence for sentence in distribution(scores).advice)


def test_each_tenth_falls_into_the_bin_that_it_begins() -> None:
    tenths = [n / 10 for n in range(11)]
    assert distribution(tenths).histogram == (1, 1, 1, 1, 1, 1, 1, 1, 1, 2)
    assert distribution([0.1 + 0.2, 0.7 - 1e-6, 0.25]).histogram == (0, 0, 1, 1, 0, 0, 1, 0, 0, 0)


def test_good_scores_need_no_advice() -> None:
    found = distribution(np.linspace(0, 1, 101).tolist())
    assert found.advice == () and sum(found.histogram) == found.count == 101
    assert found.mean == pytest.approx(0.5) and found.std == pytest.approx(float(np.std(np.linspace(0, 1, 101))))
