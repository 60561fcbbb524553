"""Results of a benchmark, and its command line: ``python -m benchmarks.padded_loop --repeats 5``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: What was measured.
        value: The median, or the ratio of medians.
        unit: Unit of the value; ``"x"`` for a ratio.
        target: The value to reach; None for a figure that is only reported.
        at_least: Whether higher is better.
        detail: A line on the origin of the value.
        samples: The underlying measurements by name.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = True
    detail: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True)
class Size:
    """The size of a benchmark.

    Attributes:
        repeats: Turns of each side; medians are over them.
        smoke: The smallest complete run: its figures are meaningless.
        only: For a row with several figures, the ones to measure; empty: all.
    """

    repeats: int = 5
    smoke: bool = False
    only: tuple[str, ...] = ()

    def pick(self, full: int, smoke: int) -> int:
        return smoke if self.smoke else full

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only


Measure = Callable[[Size], list[Figure]]


def run_alone(measure: Measure, doc: str | None) -> None:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="seconds; the figures mean nothing")
    parser.add_argument("--only", action="append", default=[], help="of a row with several figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    figures = measure(Size(args.repeats, args.smoke, tuple(args.only)))
    for figure in figures:
        print(line(figure), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(figure) for figure in figures]))


def line(figure: Figure) -> str:
    aim = ""
    if figure.target is not None:
        verdict = "reached" if figure.reached else "MISSED"
        aim = f"  ({'at least' if figure.at_least else 'at most'} {figure.target:g}: {verdict})"
    return f"{figure.name}: {show(figure.value)} {figure.unit}{aim}\n    {figure.detail}"


def show(value: float) -> str:
    """Format a value with three significant digits."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size else "0"
