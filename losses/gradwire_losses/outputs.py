"""The output of a loss: sums, and the counts that they are averaged over.

A loss never divides by the size of its input. It returns terms (a differentiable sum, and the
count to average it over) and metrics that merge, so that the engine may pass the batch in
parts, accumulate over several calls, and divide once. Values are numbers, or 0-d tensors on the model's device, which
:func:`settled` copies to the host in one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gradwire_losses import host

Figure = float | Tensor
"""A number, or a 0-d tensor that may not be computed yet."""


@dataclass(frozen=True)
class Term:
    """One summand of a loss: ``sum / count``.

    Attributes:
        sum: Differentiable scalar, with coefficients applied.
        count: The number the sum is averaged over; 0 if the batch contains none of the unit. Use 1 with unit ``"sum"``
            for a loss that is a plain sum.
        unit: The counted unit: ``"tokens"``, ``"sequences"``, ``"pairs"``, ``"groups"`` or ``"sum"``. Gradients of
            one loss and unit accumulate over calls weighted by their counts; those of ``"sum"`` are added. Terms
            of one unit in one output have the same count.
    """

    sum: Tensor
    count: Figure
    unit: str

    def scaled(self, coefficient: float) -> Term:
        """Multiply the term by a coefficient."""
        return Term(self.sum * coefficient, self.count, self.unit)

    def metric(self) -> Metric:
        """Return the term's value as a metric that merges like the term."""
        total = self.sum.detach().double()
        return Sum(total) if self.unit == "sum" else Mean(total, self.count)


class Metric(Protocol):
    """A value that can be merged from the parts of a batch."""

    def merge(self, other: Self) -> Self: ...

    def value(self) -> float: ...


@dataclass(frozen=True)
class Mean:
    """``total / count``; NaN over nothing."""

    total: Figure
    count: Figure

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Return the mean of all elements."""
        return cls(values.detach().double().sum(), values.numel())

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return float(self.total) / float(self.count) if self.count else math.nan


@dataclass(frozen=True)
class Sum:
    total: Figure

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class ExpMean:
    """``exp(total / count)``, as for perplexity."""

    total: Figure
    count: Figure

    def merge(self, other: ExpMean) -> ExpMean:
        return ExpMean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        if not self.count:
            return math.nan
        mean = float(self.total) / float(self.count)
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True)
class Max:
    maximum: Figure

    @classmethod
    def of(cls, values: Tensor) -> Max:
        return cls(values.detach().max() if values.numel() else -math.inf)

    def merge(self, other: Max) -> Max:
        return Max(max(self.maximum, other.maximum))

    def value(self) -> float:
        return float(self.maximum) if math.isfinite(self.maximum) else math.nan


@dataclass(frozen=True)
class Min:
    minimum: Figure

    @classmethod
    def of(cls, values: Tensor) -> Min:
        return cls(values.detach().min() if values.numel() else math.inf)

    def merge(self, other: Min) -> Min:
        return Min(min(self.minimum, other.minimum))

    def value(self) -> float:
        return float(self.minimum) if math.isfinite(self.minimum) else math.nan


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviation, merged without cancellation (Chan et al. 1979)."""

    count: float
    mean: Figure
    squares: Figure

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        if not values.numel():
            return cls(0, 0.0, 0.0)
        values = values.detach().double()
        mean = values.mean()
        return cls(values.numel(), mean, (values - mean).square().sum())

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * other.count / count,
            self.squares + other.squares + delta * delta * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Unbiased variance; 0 for fewer than two values."""
        return float(self.squares) / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True)
class Std:
    """Unbiased standard deviation; 0 for one value, NaN for none."""

    moments: Moments

    @classmethod
    def of(cls, values: Tensor) -> Std:
        return cls(Moments.of(values))

    def merge(self, other: Std) -> Std:
        return Std(self.moments.merge(other.moments))

    def value(self) -> float:
        return math.sqrt(self.moments.variance) if self.moments.count else math.nan


@dataclass(frozen=True)
class ExplainedVariance:
    """``1 - Var(returns - values) / (Var(returns) + 1e-5)``; near 1 when values predict returns, 0 for a constant."""

    residuals: Moments
    returns: Moments

    @classmethod
    def of(cls, values: Tensor, returns: Tensor) -> ExplainedVariance:
        return cls(Moments.of(returns - values), Moments.of(returns))

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        return ExplainedVariance(self.residuals.merge(other.residuals), self.returns.merge(other.returns))

    def value(self) -> float:
        return 1 - self.residuals.variance / (self.returns.variance + 1e-5) if self.returns.count else math.nan


@dataclass(frozen=True)
class Difference:
    """Difference of two means; NaN if either is over nothing."""

    minuend: Mean
    subtrahend: Mean

    def merge(self, other: Difference) -> Difference:
        return Difference(self.minuend.merge(other.minuend), self.subtrahend.merge(other.subtrahend))

    def value(self) -> float:
        return self.minuend.value() - self.subtrahend.value()


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation; NaN if either side does not vary."""

    first: Moments
    second: Moments
    total: Moments

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Correlation:
        first, second = first.detach().double(), second.detach().double()
        return cls(Moments.of(first), Moments.of(second), Moments.of(first + second))

    def merge(self, other: Correlation) -> Correlation:
        return Correlation(
            self.first.merge(other.first), self.second.merge(other.second), self.total.merge(other.total)
        )

    def value(self) -> float:
        first, second, total = (float(side.squares) for side in (self.first, self.second, self.total))
        spread = math.sqrt(first * second)
        return (total - first - second) / 2 / spread if spread else math.nan


@dataclass(frozen=True)
class LossOutput:
    """Terms and metrics by name. ``loss`` is the sum of the terms, each over its count.

    Attributes:
        advantages: ``[T]`` what weighs the tokens, for people to look at; None where a loss has none for each of them.
    """

    terms: Mapping[str, Term]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    advantages: Tensor | None = None

    def loss(self) -> Tensor:
        """Differentiable scalar: the sum of the terms, each divided by its count (a term with count 0 is 0)."""
        parts = [term.sum / term.count if term.count else term.sum * 0.0 for term in self.terms.values()]
        return torch.stack(parts).sum()


def merge_metrics(parts: list[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of the parts of a batch."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def settled(figures: Any, others: Sequence[Tensor] = ()) -> tuple[Any, list[Tensor]]:
    """Replace 0-d tensors by numbers in lists, dictionaries and metrics, and copy other tensors to the host.

    This waits for the device once.
    """
    tensors: list[Tensor] = []
    _find(figures, tensors)
    on_device = [tensor.detach().double() for tensor in tensors if tensor.device.type != "cpu"]
    if not on_device and not others:
        return _filled(figures, (tensor.item() for tensor in tensors)), []
    together = torch.stack(on_device) if on_device else torch.empty(0)
    numbers, *copies = host.fetched([together, *others])
    fetched = iter(numbers.tolist())
    return _filled(figures, (each.item() if each.device.type == "cpu" else next(fetched) for each in tensors)), copies


def _find(figure: Any, found: list[Tensor]) -> None:
    if isinstance(figure, Tensor):
        found.append(figure)
    elif isinstance(figure, list):
        for one in figure:
            _find(one, found)
    elif isinstance(figure, dict):
        for one in figure.values():
            _find(one, found)
    elif is_dataclass(figure):
        kind: Any = type(figure)
        for name in _names(kind):
            _find(getattr(figure, name), found)


def _filled(figure: Any, numbers: Iterator[float]) -> Any:
    if isinstance(figure, Tensor):
        return next(numbers)
    if isinstance(figure, list):
        return [_filled(one, numbers) for one in figure]
    if isinstance(figure, dict):
        return {name: _filled(one, numbers) for name, one in figure.items()}
    if is_dataclass(figure) and not isinstance(figure, type):
        kind: Any = type(figure)
        return kind(**{name: _filled(getattr(figure, name), numbers) for name in _names(kind)})
    return figure


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))
