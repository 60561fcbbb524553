"""Metrics of runs as columns, and their curves reduced to what a screen can show."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gradwire import Checkpoint, History
from gradwire.charts import text_of
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
AXES = ("step", "tokens", "time")
LARGE = ("reward_mean", "entropy", "loss", "loss (forward only)", "preference_accuracy", "token_accuracy",
         "grad_norm")  # fmt: skip
"""The metrics that say most, the first shown first."""
CURVE_POINTS = 600
"""A plot is 400 to 750 pixels wide, so two points fall on two pixels or less; more only take a browser's time."""
CACHE_BYTES = 128 << 20
NEWEST = 100
STEP_BITS = 40
"""Low bits of a number of weights that hold the step; the others count the stretches between loads."""


def min_max(x: Numbers, y: Numbers, most: int = CURVE_POINTS) -> tuple[Numbers, Numbers]:
    """Reduce a curve to the smallest and the largest value of each of ``most / 2`` equal parts, in their order.

    So every peak stays visible, which an average would hide. A curve of at most ``most`` points stays as it is.
    """
    if len(y) <= most:
        return x, y
    size = -(-len(y) // (most // 2))
    padded = np.pad(y, (0, -len(y) % size), mode="edge").reshape(-1, size)
    starts = np.arange(len(padded)) * size
    ends = np.stack([starts + padded.argmin(1), starts + padded.argmax(1)], 1)
    chosen = np.unique(np.minimum(ends, len(y) - 1))
    return x[chosen], y[chosen]


def smoothed(y: Numbers, window: int) -> Numbers:
    """The mean of each value and those before it, ``window`` of them at most."""
    if window <= 1 or not len(y):
        return y
    sums = np.concatenate([[0.0], np.cumsum(y - y[0])])  # so that what is constant stays it to the bit
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(ends - min(window, len(y)), 0)
    return np.asarray(y[0] + (sums[ends] - sums[starts]) / (ends - starts))


def has_loss(history: History) -> NDArray[np.bool_]:
    """Whether each operation computed a loss, be it NaN; a part of a batch (``accumulate=True``) has none yet."""
    whole = ((history.loss_fn != "") | (history.operation == "backward")) & (history.tokens > 0)
    return np.asarray(~np.isnan(history.loss) | whole)


def values_of(history: History) -> list[tuple[str, Numbers, NDArray[np.bool_]]]:
    """Each metric with its value of every operation, and whether the operation measured it.

    A loss and a gradient norm may be measured and NaN; of other metrics a NaN is taken for none.
    """
    computed, forward = has_loss(history), history.operation == "forward"
    timed = (history.tokens > 0) & (history.seconds > 0)
    stepped = (history.operation == "optim_step") | (history.operation == "train_step")
    measured = [
        ("loss", history.loss, computed & ~forward),
        ("grad_norm", history.grad_norm, stepped),
        ("learning_rate", history.learning_rate, ~np.isnan(history.learning_rate)),
        ("loss (forward only)", history.loss, computed & forward),
        ("tokens_per_s", history.tokens / np.where(timed, history.seconds, 1.0), timed),
    ]
    return measured + [(name, values, ~np.isnan(values)) for name, values in history.metrics.items()]


def non_finite(history: History) -> NDArray[np.bool_]:
    """Whether each operation is a trained batch whose loss, or a step whose gradient, is not finite."""
    trained = {name: measured & ~np.isfinite(values) for name, values, measured in values_of(history)}
    return np.asarray(trained["loss"] | trained["grad_norm"])


@dataclass
class _Metric:
    at: array[int] = field(default_factory=lambda: array("I"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class Figure:
    """A value of a metric that was measured.

    Attributes:
        step: Optimizer steps of the weights that it was measured with.
        earlier: Whether it is shown for later weights than these.
    """

    metric: str
    value: float
    step: int
    earlier: bool

    def text(self, digits: int) -> str:
        """The value, with its step if that is not what it is shown for."""
        return text_of(self.metric, self.value, digits) + (f" at step {self.step:,}" if self.earlier else "")


@dataclass(frozen=True)
class Operation:
    """An operation that succeeded; its ``loss`` is None if it has none, and may be NaN."""

    run_id: str
    seq: int
    operation: str
    loss_fn: str
    step: int
    loss: float | None
    tokens: int
    seconds: float
    time: float


def _extend(column: array[Any], values: NDArray[Any]) -> None:
    column.frombytes(values.astype(column.typecode).tobytes())


def _finite(metric: _Metric) -> tuple[NDArray[np.int64], Numbers]:
    """The positions and the values of a metric's finite values."""
    values = np.array(metric.values)
    finite = np.isfinite(values)
    return np.array(metric.at, np.int64)[finite], values[finite]


class Record:
    """The measurements of one run, each value with its operation.

    Attributes:
        operations: The newest operations, oldest first.
    """

    def __init__(self, history: History) -> None:
        self._axes = {name: array("d") for name in AXES}
        self._weights = array("Q")  # what each operation computed with: the stretch between loads, and the step
        self._seqs = array("Q")
        self._begins: dict[str, int] = {}  # run -> position of its first operation
        self._metrics: dict[str, _Metric] = {}
        self.operations: deque[Operation] = deque(maxlen=NEWEST)
        self.non_finite = 0  # trained batches whose loss was not finite, and steps without a finite gradient
        self._last: dict[str, int] = {}  # run -> the newest operation of it
        self._led: NDArray[np.bool_] | None = None
        self.append(history)

    def append(self, history: History) -> None:
        """Add operations behind the others; those that are there already are left out."""
        new = np.zeros(len(history), bool)
        for run_id in dict.fromkeys(history.run_id.tolist()):
            own = (history.run_id == run_id) & (history.seq > self._last.get(run_id, 0))
            if own.any():
                self._last[run_id] = int(history.seq[own].max())
                new |= own
        fresh = np.flatnonzero(new)
        if not len(fresh):
            return
        computed = has_loss(history)
        self.non_finite += int((new & non_finite(history)).sum())
        self._number_weights(history, fresh)
        begin, tokens = len(self._axes["step"]), self._axes["tokens"][-1] if self._axes["tokens"] else 0.0
        _extend(self._axes["step"], history.step[fresh])
        _extend(self._axes["time"], history.time[fresh])
        _extend(self._axes["tokens"], tokens + np.cumsum(history.tokens[fresh]))
        for n in fresh[-NEWEST:]:
            loss = float(history.loss[n])
            self.operations.append(
                Operation(
                    run_id=history.run_id[n],
                    seq=int(history.seq[n]),
                    operation=history.operation[n],
                    loss_fn=history.loss_fn[n],
                    step=int(history.step[n]),
                    loss=loss if computed[n] else None,
                    tokens=int(history.tokens[n]),
                    seconds=float(history.seconds[n]),
                    time=float(history.time[n]),
                )
            )
        for name, values, measured in values_of(history):
            there = np.flatnonzero(measured[fresh])
            if len(there):
                metric = self._metrics.setdefault(name, _Metric())
                _extend(metric.at, begin + there)
                _extend(metric.values, values[fresh][there])

    def _number_weights(self, history: History, fresh: NDArray[np.int64]) -> None:
        """Number the weights of operations: within a stretch by step; a load or a step back begins a stretch.

        ``step`` counts an operation's own step, but the loss of a ``train_step`` is that of the weights before it.
        """
        step, operation, begin = history.step[fresh], history.operation[fresh], len(self)
        before = int(self._axes["step"][-1]) if begin else 0
        new = (operation == "load_checkpoint") | (np.diff(step, prepend=before) < 0)
        stretch = (self._weights[-1] >> STEP_BITS if begin else 0) + np.cumsum(new)
        own = (operation == "train_step") & np.isfinite(history.grad_norm[fresh])  # else it was skipped
        _extend(self._weights, (stretch << STEP_BITS) + step - own)
        _extend(self._seqs, history.seq[fresh])
        run_ids = history.run_id[fresh]
        for run_id in dict.fromkeys(run_ids.tolist()):
            self._begins.setdefault(run_id, begin + int(np.argmax(run_ids == run_id)))

    def __len__(self) -> int:
        return len(self._axes["step"])

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that have values, the loss first."""
        return list(self._metrics)

    @property
    def last(self) -> dict[str, Figure]:
        """The newest value of each metric; it is earlier if its weights are those before the newest loss."""
        loss = self._metrics.get("loss")
        newest = self._weights[loss.at[-1]] if loss is not None else 0
        return {name: self._figure(name, -1, newest) for name in self._metrics}

    def newest(self, metric: str, count: int) -> Numbers:
        """The newest finite values of a metric, oldest first; empty if the run has no such metric."""
        found = self._metrics.get(metric)
        return _finite(found)[1][-count:] if found is not None else np.zeros(0)

    def first(self, metric: str, count: int) -> Numbers:
        """The first finite values of a metric, oldest first; empty if the run has no such metric."""
        found = self._metrics.get(metric)
        return _finite(found)[1][:count] if found is not None else np.zeros(0)

    def at_checkpoint(self, metric: str, checkpoint: Checkpoint) -> Figure | None:
        """The last value of a metric with a checkpoint's weights, else with earlier ones that led to them."""
        found = self._metrics.get(metric)
        if found is None:
            return None
        begin = self._begins.get(checkpoint.path.partition("/")[0], len(self))
        position = bisect_right(self._seqs, checkpoint.seq, begin) - 1  # of the last operation that it contains
        if position >= 0 and checkpoint.step < self._axes["step"][position]:
            return None  # a fork counts anew, and its first operation is yet to come
        stretch = (self._weights[position] >> STEP_BITS) if position >= 0 else 0
        weights = (stretch << STEP_BITS) + checkpoint.step
        index = bisect_right(found.at, weights, key=self._weights.__getitem__) - 1
        if index < 0 or self._weights[found.at[index]] >> STEP_BITS != stretch:
            return None
        return self._figure(metric, index, weights)

    def _figure(self, name: str, index: int, shown_for: int) -> Figure:
        metric = self._metrics[name]
        weights = self._weights[metric.at[index]]
        return Figure(name, metric.values[index], weights & ((1 << STEP_BITS) - 1), weights < shown_for)

    def metrics_over(self, axis: str) -> list[str]:
        """Names of the metrics that have values over an axis."""
        if axis != "step":
            return self.metrics
        led_here = self._led_here()
        return [name for name, metric in self._metrics.items() if led_here[np.array(metric.at, np.int64)].any()]

    def _led_here(self) -> NDArray[np.bool_]:
        """Whether each operation led to the newest: others were made void by a load, or came before a fork began."""
        if self._led is None or len(self._led) != len(self):
            stretches, steps = np.array(self._weights) >> np.uint64(STEP_BITS), np.array(self._axes["step"])
            self._led = np.ones(len(self), bool)
            _, begins = np.unique(stretches, return_index=True)
            least = math.inf  # step of those behind
            ends = [*begins[1:], len(self)]
            for begin, end in zip(begins[::-1], reversed(ends[: len(begins)]), strict=True):
                self._led[begin:end] = steps[begin:end] < least
                least = min(least, steps[begin:end].min())
        return self._led

    @property
    def num_bytes(self) -> int:
        return 40 * len(self) + sum(12 * len(each.at) for each in self._metrics.values())

    def curve(
        self, metric: str, axis: str = "step", window: int = 1, within: tuple[float, float] | None = None
    ) -> list[list[float]]:
        """The finite values of a metric over an axis, reduced by :func:`min_max`, as pairs; empty if there are none.

        Args:
            axis: One of ``AXES``.
            window: As for :func:`smoothed`.
            within: The range of the axis to show, which then has all the points; None: all of it.
        """
        metric_series = self._metrics.get(metric)
        if metric_series is None:
            return []
        at, y = _finite(metric_series)
        x = np.array(self._axes[axis])[at]
        if axis == "step":
            led_here = self._led_here()[at]
            x, y = x[led_here], y[led_here]
        y = smoothed(y, window)
        if within is not None:
            inside = (x >= within[0]) & (x <= within[1])
            x, y = x[inside], y[inside]
        x, y = min_max(x, y)
        scale = 1000.0 if axis == "time" else 1.0  # browsers count milliseconds
        return np.stack([x * scale, y], 1).tolist() if len(x) else []


class Records:
    """The records that were looked at last, within a number of bytes."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._records: OrderedDict[str, Record] = OrderedDict()

    def get(self, run_id: str) -> Record | None:
        if run_id in self._records:
            self._records.move_to_end(run_id)
        return self._records.get(run_id)

    def put(self, run_id: str, record: Record) -> None:
        self._records[run_id] = record
        self._records.move_to_end(run_id)
        while len(self._records) > 1 and sum(each.num_bytes for each in self._records.values()) > self._most_bytes:
            self._records.popitem(last=False)

    def forget(self, run_id: str = "") -> None:
        """Drop a run's record, or all."""
        if run_id:
            self._records.pop(run_id, None)
        else:
            self._records.clear()


def only(history: History, run_id: str) -> History:
    """The operations of one run."""
    own = history.run_id == run_id
    columns = {name: getattr(history, name)[own] for name in History.__dataclass_fields__ if name != "metrics"}
    return History(metrics={name: values[own] for name, values in history.metrics.items()}, **columns)
