"""Intervals for mean scores and their differences that hold at all times, with the user as the unit.

An answer's score depends on who rates it and on when: answers of one user resemble each other, and scores drift. So a
difference is taken between answers of about the same time under the same deployment (regression with an effect for each
block of consecutive answers).

Its variance is that of the draw. If the versions are equal, then scores and times are what they are whichever version
a user draws; only the draw is random, and its chances are the deployment's weights. So the variance is known, with the
answers of *all* users in it (Neyman; Fisher's sharp hypothesis): a small share of the users cannot look more alike than
they are. The same holds at any other difference, once it is taken off the scores; the interval has those at which the
sum of what remains lies within its boundary.

The boundary is that of an asymptotic confidence sequence: the normal mixture of Robbins in the form of Waudby-Smith,
Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", Annals of
Statistics 52 (2024), arXiv:2103.06476, with that variance as its clock. A user who answers again adds to an old sum
rather than a new one. That makes values at two times more alike than those of a Brownian motion on the same clock, so
by Slepian's inequality they cross the boundary no more often. tests/support/ab_tests.py simulates it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 100
"""Consecutive answers of a deployment that are compared with each other."""
MIN_USERS = 20
"""Users of each version before the central limit is relied on."""
TIGHT_AT = 10.0
"""Variance at which the boundary is tightest: about 400 answers of two versions. It matters little."""


@dataclass(frozen=True)
class Interval:
    """A closed interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Scores:
    """Scores of answers, in the order in which the answers were given.

    Attributes:
        values: [answers] in 0..1.
        users: [answers], the number of the user, or of the answer where there is no user.
        versions: [answers], the number of the version.
        deployments: [answers], the number of the deployment, whose weights the user was drawn with.
        weights: By deployment, the weight of each version.
    """

    values: NDArray[np.float64]
    users: NDArray[np.int64]
    versions: NDArray[np.int64]
    deployments: NDArray[np.int64]
    weights: Mapping[int, Sequence[float]]

    def only(self, *versions: int) -> Scores:
        """The answers of some versions."""
        return self.where(np.isin(self.versions, versions))

    def where(self, kept: NDArray[np.bool_] | slice) -> Scores:
        """Some of the answers."""
        arrays = self.values[kept], self.users[kept], self.versions[kept], self.deployments[kept]
        return Scores(*arrays, self.weights)

    def __len__(self) -> int:
        return len(self.values)


def effective_users(users: NDArray[np.int64]) -> float:
    """Number of users, where one who gave many of the answers counts less: (sum n)^2 / sum n^2."""
    counts = np.unique(users, return_counts=True)[1].astype(np.float64)
    return float(counts.sum() ** 2 / np.square(counts).sum()) if counts.size else 0.0


def boundaries(variances: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Bounds on the absolute values of sums with these variances, each at all times with probability 1 - ``alpha``."""
    log = 2 * math.log(1 / alpha)
    rho = (log + math.log1p(log)) / TIGHT_AT
    scaled = variances * rho + 1
    return np.asarray(np.sqrt(2 * scaled / rho * np.log(np.sqrt(scaled) / alpha)))


def boundary(variance: float, alpha: float) -> float:
    """:func:`boundaries` of one sum."""
    return float(boundaries(np.asarray(variance), alpha))


def mean_interval(scores: Scores, alpha: float) -> Interval:
    """The interval of the mean score; 0..1 before there are enough users."""
    if effective_users(scores.users) < MIN_USERS:
        return Interval(0.0, 1.0)
    mean = float(scores.values.mean())
    variance = _variance(scores.users, scores.values - mean, np.ones(len(scores)))
    radius = boundary(variance, alpha) / len(scores)
    return Interval(max(0.0, mean - radius), min(1.0, mean + radius))


@dataclass(frozen=True)
class Contrast:
    """The evidence of concurrent answers of two versions on the difference between them.

    Attributes:
        total: Sum over the treated of their scores less their blocks' means; at a difference d of the versions the
            random draw leaves ``total - d * weight`` with mean zero.
        weight: The same sum of the treatment; 0 if no block has answers of both versions.
        quadratic: Coefficients of 1, d and d squared of that sum's variance.
    """

    total: float
    weight: float
    quadratic: tuple[float, float, float]

    @property
    def difference(self) -> float | None:
        return self.total / self.weight if self.weight > 0 else None

    def variance(self, difference: float) -> float:
        constant, linear, square = self.quadratic
        return max(constant + difference * (linear + difference * square), 0.0)

    def excludes(self, difference: float, alpha: float) -> bool:
        return abs(self.total - difference * self.weight) > boundary(self.variance(difference), alpha)

    def edge(self, end: float, alpha: float) -> float:
        """The interval's bound between the estimate and ``end``, or ``end`` if it is not excluded."""
        inside = max(-1.0, min(1.0, self.total / self.weight))
        if not self.excludes(end, alpha):
            return end
        while abs(end - inside) > 1e-9:
            middle = (inside + end) / 2
            inside, end = (inside, middle) if self.excludes(middle, alpha) else (middle, end)
        return end


def contrast(scores: Scores, baseline: int, other: int) -> Contrast:
    """Compare the scores of ``other`` with those of ``baseline`` among concurrent answers."""
    pair = scores.only(baseline, other)
    if not len(pair):
        return Contrast(0.0, 0.0, (0.0, 0.0, 0.0))
    blocks = _blocks(pair.deployments)
    treated = _centred((pair.versions == other).astype(np.float64), blocks)
    centred = _centred(pair.values, blocks)
    numbers, deployments = np.unique(pair.deployments, return_inverse=True)
    shares = [scores.weights[number][other] for number in numbers.tolist()]
    sums = [share + scores.weights[number][baseline] for number, share in zip(numbers.tolist(), shares)]
    chances, stages = np.unique(np.divide(shares, sums), return_inverse=True)
    # A user keeps one random number for all weights (draw_version): who has the new version at a small share has it at
    # a larger one. Hence the covariance of the draws at two chances.
    covariance = np.minimum.outer(chances, chances) - np.outer(chances, chances)
    users = np.unique(pair.users, return_inverse=True)[1]
    cells, shape = users * len(chances) + stages[deployments], (int(users.max()) + 1, len(chances))
    residuals, doses = (np.bincount(cells, part, math.prod(shape)).reshape(shape) for part in (centred, treated))
    drawn, dosed = residuals @ covariance, doses @ covariance
    quadratic = float(np.vdot(drawn, residuals)), -2 * float(np.vdot(drawn, doses)), float(np.vdot(dosed, doses))
    return Contrast(float(treated @ centred), float(treated @ treated), quadratic)


def difference_interval(scores: Scores, baseline: int, other: int, alpha: float) -> tuple[float | None, Interval]:
    """Estimate the mean of ``other`` less that of ``baseline`` among concurrent answers.

    Returns:
        The difference, None if no block has answers of both; and its interval, -1..1 before both have enough users.
    """
    found = contrast(scores, baseline, other)
    if found.weight <= 0 or min(number_of_users(scores.only(version)) for version in (baseline, other)) < MIN_USERS:
        return found.difference, Interval(-1.0, 1.0)
    return found.difference, Interval(found.edge(-1.0, alpha), found.edge(1.0, alpha))


def number_of_users(scores: Scores) -> int:
    return len(np.unique(scores.users))


def _variance(users: NDArray[np.int64], parts: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Clustered variance of a sum of answers' parts; a user's leverage is their share of the weights."""
    users = np.unique(users, return_inverse=True)[1]
    leverage = np.bincount(users, weights) / weights.sum()
    return float(np.square(np.bincount(users, parts) / np.maximum(1 - leverage, 1e-2)).sum())


def _blocks(deployments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the blocks: up to ``BLOCK`` consecutive answers of one deployment."""
    order = np.argsort(deployments, kind="stable")
    sorted_ = deployments[order]
    place = np.arange(len(order)) - np.searchsorted(sorted_, sorted_)
    first = (place % BLOCK == 0).astype(np.int64)
    blocks = np.empty_like(order)
    blocks[order] = np.cumsum(first) - 1
    return blocks


def _centred(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> NDArray[np.float64]:
    return values - (np.bincount(blocks, values) / np.maximum(np.bincount(blocks), 1))[blocks]
