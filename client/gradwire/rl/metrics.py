"""Metrics that merge: of the parts of an iteration, whatever their sizes, as of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

Metrics = dict[str, float]


class Metric(Protocol):
    """A value of one part of an iteration that can be merged with those of the others."""

    def merge(self, other: Self) -> Self: ...

    def value(self) -> float: ...


@dataclass(frozen=True)
class Mean:
    """``total / count``; NaN over nothing."""

    total: float
    count: float

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Mean:
        values = np.asarray(values, np.float64)
        return cls(float(values.sum()), values.size)

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True)
class Sum:
    """A count, or seconds that follow each other."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Max:
    maximum: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.maximum, other.maximum))

    def value(self) -> float:
        return float(self.maximum)


@dataclass(frozen=True)
class Min:
    minimum: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.minimum, other.minimum))

    def value(self) -> float:
        return float(self.minimum)


@dataclass(frozen=True)
class Std:
    """Standard deviation of all values (not of the parts' means), merged without cancellation (Chan et al. 1979)."""

    count: float
    mean: float
    squares: float

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Std:
        values = np.asarray(values, np.float64)
        if not values.size:
            return cls(0, 0.0, 0.0)
        return cls(values.size, float(values.mean()), float(values.var() * values.size))

    def merge(self, other: Std) -> Std:
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        step = other.mean - self.mean
        squares = self.squares + other.squares + step**2 * self.count * other.count / count
        return Std(count, self.mean + step * other.count / count, squares)

    def value(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan


@dataclass(frozen=True)
class Elapsed:
    """Seconds from the first beginning to the last end, of parts that may overlap; with ``amount``, that per second.

    Attributes:
        began, ended: On one clock, in seconds.
        amount: Work done in that time, such as tokens; None for the seconds themselves.
    """

    began: float
    ended: float
    amount: float | None = None

    def merge(self, other: Elapsed) -> Elapsed:
        amount = None if self.amount is None else self.amount + (other.amount or 0)
        return Elapsed(min(self.began, other.began), max(self.ended, other.ended), amount)

    def value(self) -> float:
        seconds = self.ended - self.began
        return seconds if self.amount is None else self.amount / max(seconds, 1e-9)


Typed = Mapping[str, Metric]


def merged(parts: Iterable[Typed]) -> dict[str, Metric]:
    """Merge the metrics of parts; a part may lack some."""
    result: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            result[name] = result[name].merge(metric) if name in result else metric
    return result


def values_of(metrics: Typed) -> Metrics:
    """Return the metrics as numbers."""
    return {name: metric.value() for name, metric in metrics.items()}


def of_loss(name: str, value: float, tokens: float) -> Metric:
    """Return a loss's metric of one batch, which the server sends as a number.

    Its name says how it merges: ``num_…`` is a count, ``…_max`` and ``…_min`` are extremes. All others are averaged by
    the batches' scored tokens. That is exact for means over tokens; of means over sequences and of standard deviations
    it is the weighted mean.
    """
    if name.startswith("num_"):
        return Sum(value)
    if name.endswith("_max"):
        return Max(value)
    if name.endswith("_min"):
        return Min(value)
    return Mean(value * tokens, tokens)
