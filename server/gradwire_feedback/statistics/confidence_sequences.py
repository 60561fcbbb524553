"""Confidence sequences for the mean of bounded scores: intervals that stay valid however often they are inspected.

The predictable plug-in empirical-Bernstein sequence, Theorem 2 of Waudby-Smith and Ramdas, "Estimating means of bounded
random variables by betting", Journal of the Royal Statistical Society B 86 (2024), arXiv:2010.09686: with probability 1
- alpha the mean is in *all* intervals of the sequence, so an experiment may stop at any time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_BET = 0.5


@dataclass(frozen=True)
class Interval:
    """A closed interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def confidence_sequence(scores: ArrayLike, alpha: float = 0.05) -> NDArray[np.float64]:
    """Return the interval after each score, [scores, 2]; each lies within all earlier ones.

    Args:
        scores: [scores] in 0..1, in order of arrival; their mean given the earlier scores must be constant.
        alpha: Probability that the mean is ever outside.

    Raises:
        ValueError: A score is outside 0..1.
    """
    x = np.asarray(scores, np.float64)
    if x.size and not (x.min() >= 0.0 and x.max() <= 1.0):
        raise ValueError("scores must be in 0..1")
    t = np.arange(1, x.size + 1)
    means = (0.5 + np.cumsum(x)) / (t + 1)
    variances = (0.25 + np.cumsum((x - means) ** 2)) / (t + 1)
    mean_before = np.concatenate([[0.5], means[:-1]])[: x.size]
    variance_before = np.concatenate([[0.25], variances[:-1]])[: x.size]
    bets = np.minimum(np.sqrt(2 * np.log(2 / alpha) / (variance_before * t * np.log1p(t))), LARGEST_BET)
    spent = 4 * (x - mean_before) ** 2 * (-np.log1p(-bets) - bets) / 4
    total = np.cumsum(bets)
    centre = np.cumsum(bets * x) / total
    radius = (np.log(2 / alpha) + np.cumsum(spent)) / total
    low = np.maximum.accumulate(np.clip(centre - radius, 0.0, 1.0))
    high = np.minimum.accumulate(np.clip(centre + radius, 0.0, 1.0))
    return np.stack([low, high], axis=1)


def interval(scores: ArrayLike, alpha: float = 0.05) -> Interval:
    """The newest interval for the mean; 0..1 before the first score."""
    sequence = confidence_sequence(scores, alpha)
    return Interval(float(sequence[-1, 0]), float(sequence[-1, 1])) if len(sequence) else Interval(0.0, 1.0)


def difference_interval(baseline: ArrayLike, other: ArrayLike, alpha: float = 0.05) -> Interval:
    """Return the newest interval for mean(other) - mean(baseline).

    It combines one sequence per mean at alpha / 2: by the union bound both hold at all times with probability
    1 - alpha, whatever the order and the number of scores on either side.
    """
    first, second = interval(baseline, alpha / 2), interval(other, alpha / 2)
    return Interval(second.low - first.high, second.high - first.low)
