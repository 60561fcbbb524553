"""Intervals for mean scores and their differences that hold at all times, with the user as the unit.

An answer's score depends on who rates it and on when: answers of one user resemble each other, and scores drift. So a
difference is taken between answers of about the same time under the same deployment (regression with an effect for each
block of consecutive answers), and its variance is the sum over *users* of their squared parts (clustered, each user's
part enlarged by its leverage as in the jackknife). Users are drawn at random for each version, which is all that the
difference needs: drift and changed weights shift both versions of a block alike.

The interval is an asymptotic confidence sequence: the normal-mixture boundary of Robbins in the form of Waudby-Smith,
Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", Annals of
Statistics 52 (2024), arXiv:2103.06476, with the clustered variance as its clock. A user who answers again adds to an
old sum rather than a new one. That makes values at two times more alike than those of a Brownian motion on the same
clock, so by Slepian's inequality they cross the boundary no more often. tests/support/ab_tests.py simulates it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 100
"""Consecutive answers of a deployment that are compared with each other."""
MIN_USERS = 20
"""Users of each version, counted by :func:`effective_users`, before the central limit is relied on."""
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
    """

    values: NDArray[np.float64]
    users: NDArray[np.int64]
    versions: NDArray[np.int64]
    deployments: NDArray[np.int64]

    def only(self, *versions: int) -> Scores:
        """The answers of some versions."""
        kept = np.isin(self.versions, versions)
        return Scores(self.values[kept], self.users[kept], self.versions[kept], self.deployments[kept])

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


def difference_interval(scores: Scores, baseline: int, other: int, alpha: float) -> tuple[float | None, Interval]:
    """Estimate the mean of ``other`` less that of ``baseline`` among concurrent answers.

    Returns:
        The difference, None if no block has answers of both; and its interval, -1..1 before both have enough users.
    """
    pair = scores.only(baseline, other)
    blocks = _blocks(pair.deployments)
    treated = _centred((pair.versions == other).astype(np.float64), blocks)
    weight = float(np.square(treated).sum())
    if weight <= 0:
        return None, Interval(-1.0, 1.0)
    centred = _centred(pair.values, blocks)
    difference = float(treated @ centred) / weight
    if min(effective_users(pair.only(version).users) for version in (baseline, other)) < MIN_USERS:
        return difference, Interval(-1.0, 1.0)
    variance = _variance(pair.users, treated * (centred - difference * treated), np.square(treated))
    radius = boundary(variance, alpha) / weight
    return difference, Interval(max(-1.0, difference - radius), min(1.0, difference + radius))


def _variance(users: NDArray[np.int64], parts: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Clustered variance of a sum of answers' parts; a user's leverage is their share of the weights."""
    users = np.unique(users, return_inverse=True)[1]
    leverage = np.bincount(users, weights) / weights.sum()
    return float(np.square(np.bincount(users, parts) / np.maximum(1 - leverage, 1e-2)).sum())


def _blocks(deployments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the blocks: up to ``BLOCK`` consecutive answers of one deployment."""
    order = np.argsort(deployments, kind="stable")
    sorted_ = deployments[order]
    first = np.searchsorted(sorted_, sorted_)
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - first
    return np.unique(np.stack([deployments, place // BLOCK]), axis=1, return_inverse=True)[1].reshape(-1)


def _centred(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> NDArray[np.float64]:
    return values - (np.bincount(blocks, values) / np.maximum(np.bincount(blocks), 1))[blocks]
