"""Progress bars with live metrics, a table of held-out metrics, and a report with settings and plots in one file."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import sys
import textwrap
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
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:66rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b00}.good{color:#070}
img{max-width:100%}pre{background:#f6f6f6;padding:.6rem;overflow-x:auto}"""
PANELS_ACROSS = 2
SMOOTHED = 20
"""Number of windows of a curve's running mean; a shorter curve is shown as it is."""
LOG_SPAN = 100
"""A positive curve that spans more than this ratio is drawn on a logarithmic axis."""
LABEL_CHARACTERS = 30


@dataclass(frozen=True)
class Figure:
    """A held-out metric before and after a stage. ``aim``: the better direction; none if it is only observed."""

    stage: str
    name: str
    unit: str
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
    units: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def describe(self, heading: str, **facts: str) -> None:
        """Say what was trained on what, and how: a table of the report. "_" in a name is a space there."""
        self.facts.setdefault(heading, {}).update({name.replace("_", " "): text for name, text in facts.items()})

    @contextmanager
    def progress(
        self, stage: str, steps: int, units: Mapping[str, str]
    ) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Progress bar of a stage; yields a function that takes the metrics of one step and draws and stores them.

        If the output is not a terminal, it prints ten lines per stage instead.

        Args:
            units: Unit of each metric.
        """
        self.units |= units
        legend = "; ".join(f"{name}: {unit}" for name, unit in units.items())
        self.console.print(f"{stage}, {steps} steps ({legend})", highlight=False, soft_wrap=True, style="dim")
        began = time.monotonic()
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
        self.seconds[stage] = time.monotonic() - began

    def figure(self, stage: str, name: str, unit: str, before: float, after: float, aim: Aim = "") -> None:
        self.figures.append(Figure(stage, name, unit, before, after, aim))

    def note(self, heading: str, text: str) -> None:
        """Add text to the report, such as samples."""
        self.notes.append((heading, text))

    def table(self) -> Table:
        table = Table("stage", "held-out figure", "unit", "before", "after", "", title=self.title)
        for figure in self.figures:
            colour = "green" if figure.improved else "red"
            table.add_row(
                figure.stage, figure.name, figure.unit, _number(figure.before), _number(figure.after),
                f"[{colour}]{figure.verdict}",
            )  # fmt: skip
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
        page = self.folder / "report.html"
        page.write_text(
            f"<!doctype html><meta charset=utf-8><title>{html.escape(self.title)}</title><style>{STYLE}</style>"
            f"<h1>{html.escape(self.title)}</h1><p>{time.monotonic() - self.started:.0f} seconds in all.</p>"
            f"<h2>Held-out figures</h2>{self._figures()}{''.join(map(self._section, self._headings()))}"
            + "".join(f"<h2>{html.escape(each)}</h2><pre>{html.escape(text)}</pre>" for each, text in self.notes),
            encoding="utf-8",
        )
        return page

    def _headings(self) -> list[str]:
        return list(dict.fromkeys([*self.facts, *self.curves]))

    def _figures(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(figure.stage)}</td><td>{html.escape(figure.name)}</td>"
            f"<td>{html.escape(figure.unit)}</td>"
            f"<td class=n>{_number(figure.before)}</td><td class=n>{_number(figure.after)}</td>"
            f"<td class={'good' if figure.improved else 'bad'}>{figure.verdict}</td></tr>"
            for figure in self.figures
        )
        return f"<table><tr><th>stage<th>figure<th>unit<th>before<th>after<th></tr>{rows}</table>"

    def _section(self, heading: str) -> str:
        facts = dict(self.facts.get(heading, {}))
        if heading in self.seconds:
            facts["time"] = f"{self.seconds[heading]:.0f} seconds"
        rows = "".join(f"<tr><th>{html.escape(name)}<td>{html.escape(text)}</tr>" for name, text in facts.items())
        curves = self.curves.get(heading, {})
        picture = base64.b64encode(_plot(curves, self.units)).decode() if curves else ""
        image = f"<img alt='curves of {html.escape(heading)}' src='data:image/png;base64,{picture}'>" if picture else ""
        return f"<h2>{html.escape(heading[:1].upper() + heading[1:])}</h2><table>{rows}</table>{image}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _plot(curves: Mapping[str, list[tuple[int, float]]], units: Mapping[str, str]) -> bytes:
    """Draw a panel for each curve: every step in grey, and a running mean over it where the curve is long."""
    from matplotlib.figure import Figure as Drawing

    down = math.ceil(len(curves) / PANELS_ACROSS)
    drawing = Drawing(figsize=(5.6 * PANELS_ACROSS, 2.9 * down), layout="constrained")
    for index, (name, points) in enumerate(curves.items(), 1):
        axis = drawing.add_subplot(down, PANELS_ACROSS, index)
        steps, values = zip(*points)
        window = len(values) // SMOOTHED
        axis.plot(steps, values, color="#9ab" if window > 1 else "#036", linewidth=1, label="each step")
        if window > 1:
            means = [sum(values[start : start + window]) / window for start in range(len(values) - window + 1)]
            middles = steps[window // 2 :][: len(means)]
            axis.plot(middles, means, color="#036", linewidth=1.8, label=f"mean of {window} steps")
            axis.legend(fontsize=9, frameon=False)
        if max(values) > LOG_SPAN * min(values) > 0:
            axis.set_yscale("log")
        axis.set_title(name.replace("_", " "), fontsize=12)
        axis.set_ylabel(textwrap.fill(units.get(name, ""), LABEL_CHARACTERS), fontsize=10)
        axis.set_xlabel("step", fontsize=10)
        axis.grid(alpha=0.3)
    picture = io.BytesIO()
    drawing.savefig(picture, format="png", dpi=100)
    return picture.getvalue()
