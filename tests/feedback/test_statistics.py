"""Statistics against plain float64 references, and against what they promise."""

from __future__ import annotations

import itertools
import math

import krippendorff
import numpy as np
import pytest
from gradwire_feedback.statistics.agreement import agreement
from gradwire_feedback.statistics.confidence_sequences import confidence_sequence, difference_interval, interval
from gradwire_feedback.statistics.distribution import distribution
from gradwire_feedback.statistics.sample_ratio import sample_ratio_p_value
from numpy.typing import NDArray


def reference_sequence(scores: list[float], alpha: float) -> list[tuple[float, float]]:
    """Theorem 2 of Waudby-Smith and Ramdas, a sum at a time."""
    low, high, found = 0.0, 1.0, []
    mean, variance = 0.5, 0.25
    bets = weighted = spent = 0.0
    for t, x in enumerate(scores, 1):
        bet = min(math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(1 + t))), 0.5)
        psi = (-math.log(1 - bet) - bet) / 4
        bets, weighted, spent = bets + bet, weighted + bet * x, spent + 4 * (x - mean) ** 2 * psi
        radius = (math.log(2 / alpha) + spent) / bets
        low, high = max(low, weighted / bets - radius), min(high, weighted / bets + radius)
        found.append((low, high))
        total = math.fsum(scores[:t])
        mean = (0.5 + total) / (t + 1)
        means = [(0.5 + math.fsum(scores[:i])) / (i + 1) for i in range(1, t + 1)]
        variance = (0.25 + math.fsum((s - m) ** 2 for s, m in zip(scores[:t], means))) / (t + 1)
    return found


@pytest.mark.parametrize("alpha", [0.05, 0.001])
@pytest.mark.parametrize("kind", ["uniform", "all high", "halves", "one"])
def test_the_sequence_is_the_papers(kind: str, alpha: float) -> None:
    rng = np.random.default_rng(3)
    scores = {
        "uniform": rng.random(200),
        "all high": np.ones(150),
        "halves": rng.integers(0, 2, 200).astype(float),
        "one": np.array([0.7]),
    }[kind]
    expected = reference_sequence(scores.tolist(), alpha)
    assert np.allclose(confidence_sequence(scores, alpha), expected, rtol=1e-12, atol=1e-12)


def test_it_narrows_on_the_mean_and_never_widens() -> None:
    rng = np.random.default_rng(0)
    sequence = confidence_sequence(rng.beta(8, 4, 5000), 0.05)
    assert np.all(np.diff(sequence[:, 0]) >= 0) and np.all(np.diff(sequence[:, 1]) <= 0)
    assert sequence[-1, 0] < 8 / 12 < sequence[-1, 1] and sequence[-1, 1] - sequence[-1, 0] < 0.05


def test_without_scores_nothing_is_known_and_other_scores_are_refused() -> None:
    assert interval([]) == interval([], 0.5) and (interval([]).low, interval([]).high) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"0\.\.1"):
        confidence_sequence([0.5, 1.5])
    with pytest.raises(ValueError, match=r"0\.\.1"):
        confidence_sequence([math.nan])


def looked_at_after_every_rating(first: NDArray[np.float64], second: NDArray[np.float64], alpha: float) -> bool:
    """Whether the difference is ever told from 0, with a look after each rating of either side in turn."""
    a, b = confidence_sequence(first, alpha / 2), confidence_sequence(second, alpha / 2)
    lows, highs = b[:, 0] - a[:, 1], b[:, 1] - a[:, 0]
    between = np.r_[b[1:, 0] - a[:-1, 1]], np.r_[b[1:, 1] - a[:-1, 0]]
    return bool(np.any(lows > 0) or np.any(highs < 0) or np.any(between[0] > 0) or np.any(between[1] < 0))


def test_two_thousand_tests_of_equal_versions_rarely_find_a_winner() -> None:
    rng = np.random.default_rng(12)
    draws = (
        lambda n: rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], n, p=[0.1, 0.1, 0.2, 0.3, 0.3]),
        lambda n: rng.integers(0, 2, n).astype(float),
        lambda n: rng.beta(2, 5, n),
        lambda n: rng.random(n),
    )
    found = [looked_at_after_every_rating(draw(300), draw(300), 0.05) for draw in draws for _ in range(500)]
    assert len(found) == 2000
    assert np.mean(found) <= 0.05


def test_a_real_difference_is_found() -> None:
    rng = np.random.default_rng(5)
    gap = difference_interval(rng.beta(4, 6, 600), rng.beta(6, 4, 600))
    assert 0 < gap.low < 0.2 < gap.high


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


def test_good_scores_need_no_advice() -> None:
    found = distribution(np.linspace(0, 1, 101).tolist())
    assert found.advice == () and sum(found.histogram) == found.count == 101
    assert found.mean == pytest.approx(0.5) and found.std == pytest.approx(float(np.std(np.linspace(0, 1, 101))))
