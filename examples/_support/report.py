"""Progress bars with live metrics, a table of held-out metrics, and a report with plots in one HTML file."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

Aim = Literal["up", "down", ""]
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b00}.good{color:#070}
img{max-width:100%}pre{background:#f6f6f6;padding:.6rem;overflow-x:auto}"""


@dataclass(frozen=True)
class Figure:
    """A held-out metric before and after a stage. ``aim``: the better direction; none if it is only observed."""

    stage: str
    name: str
    before: float
    after: float
    aim: Aim

    @property
    def improved(self) -> bool:
        """Whether it changed in the right direction; always true for a metric without an aim."""
        return not self.aim or (self.after > self.before if self.aim == "up" else self.after < self.before)

    @property
    def verdict(self) -> str:
        return "" if not self.aim else "improved" if self.improved else "NOT improved"


@dataclass
class Report:
    """Collects curves and metrics during a run.

    Attributes:
        folder: Folder of ``report.html`` and ``curves.jsonl``.
        title: Title of the report.
    """

    folder: Path
    title: str
    console: Console = field(default_factory=lambda: Console(width=None if sys.stdout.isatty() else 120))
    curves: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def progress(self, stage: str, steps: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Progress bar of a stage; yields a function that takes the metrics of one step and draws and stores them.

        If the output is not a terminal, it prints ten lines per stage instead.
        """
        columns = (
            TextColumn("{task.description}", table_column=Column(min_width=12, no_wrap=True)),
            BarColumn(bar_width=16, table_column=Column(min_width=16)),
            MofNCompleteColumn(table_column=Column(min_width=7, no_wrap=True)),
            TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True)),
        )
        live = self.console.is_terminal
        with Progress(*columns, console=self.console, disable=not live) as bars:
            bar = bars.add_task(stage, total=steps, metrics="")
            curve = self.curves.setdefault(stage, {})
            taken = 0

            def step(metrics: Mapping[str, float]) -> None:
                nonlocal taken
                taken += 1
                for name, value in metrics.items():
                    curve.setdefault(name, []).append((taken, value))
                text = "  ".join(f"{name} {value:.3g}" for name, value in metrics.items())
                bars.update(bar, advance=1, metrics=text)
                if not live and (taken % max(1, steps // 10) == 0 or taken == steps):
                    self.console.print(f"{stage:12} {taken:4}/{steps}  {text}", highlight=False, soft_wrap=True)

            yield step

    def figure(self, stage: str, name: str, before: float, after: float, aim: Aim = "") -> None:
        self.figures.append(Figure(stage, name, before, after, aim))

    def note(self, heading: str, text: str) -> None:
        """Add text to the report, such as samples."""
        self.notes.append((heading, text))

    def table(self) -> Table:
        table = Table("stage", "held-out figure", "before", "after", "", title=self.title)
        for figure in self.figures:
            colour = "green" if figure.improved else "red"
            table.add_row(
                figure.stage, figure.name, _number(figure.before), _number(figure.after), f"[{colour}]{figure.verdict}"
            )
        return table

    def not_improved(self) -> list[Figure]:
        return [figure for figure in self.figures if not figure.improved]

    def write(self) -> Path:
        """Write both files; return the report's path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "curves.jsonl").open("w") as lines:
            for stage, curves in self.curves.items():
                for name, points in curves.items():
                    lines.write(json.dumps({"stage": stage, "metric": name, "points": points}) + "\n")
        rows = "".join(
            f"<tr><td>{html.escape(figure.stage)}</td><td>{html.escape(figure.name)}</td>"
            f"<td class=n>{_number(figure.before)}</td><td class=n>{_number(figure.after)}</td>"
            f"<td class={'good' if figure.improved else 'bad'}>{figure.verdict}</td></tr>"
            for figure in self.figures
        )
        plots = "".join(
            f"<h2>{html.escape(stage)}</h2><img alt='curves of {html.escape(stage)}' "
            f"src='data:image/png;base64,{base64.b64encode(_plot(curves)).decode()}'>"
            for stage, curves in self.curves.items()
            if curves
        )
        notes = "".join(f"<h2>{html.escape(each)}</h2><pre>{html.escape(text)}</pre>" for each, text in self.notes)
        page = self.folder / "report.html"
        page.write_text(
            f"<!doctype html><meta charset=utf-8><title>{html.escape(self.title)}</title><style>{STYLE}</style>"
            f"<h1>{html.escape(self.title)}</h1><p>{time.monotonic() - self.started:.0f} seconds in all.</p>"
            f"<table><tr><th>stage<th>held-out figure<th>before<th>after<th></tr>{rows}</table>{plots}{notes}"
        )
        return page


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _plot(curves: Mapping[str, list[tuple[int, float]]]) -> bytes:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(3.2 * len(curves), 2.6), layout="constrained")
    for axis, (name, points) in zip(drawing.subplots(1, len(curves), squeeze=False)[0], curves.items()):
        axis.plot(*zip(*points), linewidth=1.2)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    picture = io.BytesIO()
    drawing.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
