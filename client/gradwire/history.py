"""The record of a run: the metrics of each operation, as kept by the server."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gradwire_proto.history import METRIC, TEXTS, to_columns
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import html
from gradwire.descriptions import RunInfo
from gradwire.errors import InvalidArgumentError
from gradwire.extras import require
from gradwire.results import Array

SHOWN_ROWS = 10
PANELS_ACROSS = 3


@dataclass(frozen=True, eq=False)
class History:
    """The successful operations of a run in order of execution, as columns of equal length.

    A fork's history begins with that of its source, up to the checkpoint. The server keeps 100,000 operations per
    run (``--limit max_history_points=N``); of a longer run it keeps evenly spaced operations of each kind.
    ``history["name"]`` is the column of this name, including metrics.

    Attributes:
        step: Number of optimizer steps after the operation, including its own.
        operation: ``"forward_backward"``, ``"optim_step"``, ``"sample"`` and so on.
        loss: float64; NaN if there is none.
        metrics: One column per metric, float64; NaN if the operation has no such metric.
        learning_rate: Learning rate of an ``optim_step`` or ``train_step``, else NaN.
        grad_norm: Gradient norm before clipping of an ``optim_step`` or ``train_step``, else NaN.
        tokens: Tokens that went through the model or were sampled.
        seconds: Compute time on the server.
        loss_fn: The loss of a ``forward_backward``, ``train_step`` or ``forward``, else ``""``.
        time: Unix time of the end of the operation.
        run_id: The run that executed it.
        seq: Its number in that run.
    """

    step: Array
    operation: Array
    loss: Array
    metrics: Mapping[str, Array]
    learning_rate: Array
    grad_norm: Array
    tokens: Array
    seconds: Array
    loss_fn: Array
    time: Array
    run_id: Array
    seq: Array

    @staticmethod
    def from_wire(pages: Sequence[pb.HistoryPage]) -> History:
        """Join pages; those of an older server have points."""
        counts, parts = list[int](), list[dict[str, Array]]()
        for page in pages or [pb.HistoryPage()]:
            columns = page.columns if page.HasField("columns") else to_columns(page.points)
            values = np.frombuffer(columns.values, "<f8").reshape(len(columns.names), -1)
            part: dict[str, Array] = dict(zip(columns.names, values))
            texts = np.array([*columns.texts, ""], object)
            for name in TEXTS:
                part[name] = texts[part[name].astype(np.int64)]
            counts.append(values.shape[1])
            parts.append(part)

        def joined(name: str) -> Array:
            return np.concatenate([
                part[name] if name in part else np.full(count, math.nan) for part, count in zip(parts, counts)
            ])  # fmt: skip

        metrics = sorted({name for part in parts for name in part if name.startswith(METRIC)})
        return History(
            step=joined("step").astype(np.int64),
            operation=joined("operation"),
            loss=joined("loss"),
            metrics={name.removeprefix(METRIC): joined(name) for name in metrics},
            learning_rate=joined("learning_rate"),
            grad_norm=joined("grad_norm"),
            tokens=joined("tokens").astype(np.int64),
            seconds=joined("seconds"),
            loss_fn=joined("loss_fn"),
            time=joined("time"),
            run_id=joined("run_id"),
            seq=joined("seq").astype(np.int64),
        )

    @property
    def columns(self) -> dict[str, Array]:
        """Every column by name; a metric with the name of another column is ``"metrics.NAME"``.

        ``pandas.DataFrame(history.columns)`` and ``polars.DataFrame(history.columns)`` accept it directly.
        """
        own = {name: getattr(self, name) for name in FIRST}
        last = {name: getattr(self, name) for name in LAST}
        metrics = {
            f"metrics.{name}" if name in own or name in last else name: values for name, values in self.metrics.items()
        }
        return own | metrics | last

    def __getitem__(self, name: str) -> Array:
        columns = self.columns
        if name not in columns:
            raise KeyError(f"the history has no column {name!r}; it has {', '.join(columns)}")
        return columns[name]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(self.step)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the operations as dictionaries of Python numbers and strings; None where a column has no value."""
        columns = [(name, values.tolist()) for name, values in self.columns.items()]
        for index in range(len(self)):
            yield {name: _value(values[index]) for name, values in columns}

    def to_csv(self, path: str | Path) -> Path:
        """Write a CSV file with a header line; missing values are empty.

        Returns:
            The file's path.
        """
        path = _made(path)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(self.columns))
            writer.writeheader()
            writer.writerows(self.rows())
        return path

    def to_jsonl(self, path: str | Path) -> Path:
        """Write one JSON object per line, with the metrics of the operation as a nested object.

        Returns:
            The file's path.
        """
        path = _made(path)
        own = [(name, getattr(self, name).tolist()) for name in FIRST]
        last = [(name, getattr(self, name).tolist()) for name in LAST]
        metrics = [(name, values.tolist()) for name, values in self.metrics.items()]
        with path.open("w", encoding="utf-8") as file:
            for index in range(len(self)):
                line = {name: _value(values[index]) for name, values in own}
                line["metrics"] = {name: values[index] for name, values in metrics if math.isfinite(values[index])}
                line |= {name: _value(values[index]) for name, values in last}
                file.write(json.dumps(line, allow_nan=False) + "\n")
        return path

    def plot(self, *names: str, path: str | Path | None = None) -> Any:
        """Plot columns over the optimizer steps, one panel each. Needs matplotlib (``gradwire[plot]``).

        Args:
            names: The columns; by default the loss, the gradient norm, the learning rate and every metric.
            path: File to write; its ending selects the format.

        Returns:
            The ``matplotlib`` figure, which a notebook shows.

        Raises:
            InvalidArgumentError: A column does not exist or has no numbers.
        """
        columns = self.columns
        for name in names:
            if name not in columns or columns[name].dtype == object:
                numeric = [each for each, values in columns.items() if values.dtype != object]
                raise InvalidArgumentError(
                    f"the history has no column of numbers {name!r}; it has {', '.join(numeric)}",
                    field="names",
                    rule="a column of numbers",
                )
        drawn = names or tuple(
            name
            for name in columns
            if name in ("loss", "grad_norm", "learning_rate") or name not in (*FIRST, *LAST)
            if np.isfinite(columns[name]).any()
        )
        figures = require("matplotlib.figure", "plot", "History.plot")
        down = max(1, math.ceil(len(drawn) / PANELS_ACROSS))
        across = min(PANELS_ACROSS, max(1, len(drawn)))
        figure = figures.Figure(figsize=(4 * across, 2.6 * down), layout="constrained")
        for index, name in enumerate(drawn):
            axis = figure.add_subplot(down, across, index + 1)
            series = self._series(columns[name])
            for label, (x, y) in series.items():
                axis.plot(x, y, linewidth=1.2, marker="." if len(x) == 1 else None, label=label)
            if len(series) > 1:
                axis.legend(fontsize=7)
            axis.set_title(name, fontsize=10)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        if path is not None:
            figure.savefig(_made(path))
        return figure

    def _series(self, values: Array) -> dict[str, tuple[Array, Array]]:
        """Label -> steps and values, for each operation and loss that has any."""
        series: dict[str, tuple[Array, Array]] = {}
        there, steps = np.isfinite(values.astype(np.float64)), self._steps()
        for operation, loss_fn in dict.fromkeys(zip(self.operation.tolist(), self.loss_fn.tolist())):
            chosen = there & (self.operation == operation) & (self.loss_fn == loss_fn)
            if chosen.any():
                name = {"forward": f"{loss_fn} (forward)"}.get(operation, loss_fn) or operation
                series[name] = (steps[chosen], values[chosen])
        return series

    def _steps(self) -> Array:
        """Steps that continue to count where a fork restarted its count."""
        steps, before, last = self.step.copy(), 0, 0
        for run_id in dict.fromkeys(self.run_id.tolist()):
            own = self.run_id == run_id
            if self.step[own][0] < last:
                before += last
            last = int(self.step[own].max())
            steps[own] += before
        return steps

    def __repr__(self) -> str:
        return f"<History of {len(self)} operations: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        names = [name for name in self.columns if name not in LAST]
        rows: Iterable[dict[str, Any]] = self.rows()
        newest = list(rows)[-SHOWN_ROWS:]
        shown = [name for name in names if any(row[name] is not None for row in newest)]
        caption = f"{len(self)} operations" + (f", the last {len(newest)}" if len(newest) < len(self) else "")
        return html.table(shown, [[row[name] for name in shown] for row in newest], caption=caption)


@dataclass(frozen=True, eq=False)
class RunUpdates:
    """Changes of runs, from ``service.watch()``.

    Attributes:
        runs: The runs that changed, as they are now.
        gone: Ids of runs that were deleted, or are no longer shared with your key.
        history: Figures of the operations that have finished since; empty without ``with_points``.
        cursor: Where ``watch`` can go on; empty if more messages of the same list follow.
        whole: The messages from here to the next cursor list every run: forget those that they lack. Points may be
            missing before it, which ``history()`` of each run has.
        jobs_changed: Whether one of your jobs is not as it was.
    """

    runs: tuple[RunInfo, ...]
    gone: tuple[str, ...]
    history: History
    cursor: str
    whole: bool
    jobs_changed: bool = False


FIRST = ("step", "operation", "loss_fn", "loss", "learning_rate", "grad_norm", "tokens", "seconds")
LAST = ("time", "run_id", "seq")


def _value(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _made(path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
