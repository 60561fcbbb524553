"""The table of benchmarks with targets on a CPU: ``python -m benchmarks``, or ``make bench``.

    python -m benchmarks [--long | --only ROW …] [--repeats 3] [--smoke] [--json FILE] [--write-docs]

Each row is a module that also runs alone, in its own process here, so that a row that fails or takes too long does not
affect the others. ``--long`` runs the rows that take many minutes each, instead of the others. Figures go to a JSON
file with the machine's description; ``--write-docs`` puts the table into ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ROOT, machine
from benchmarks.other_side import WAITING
from benchmarks.report import Figure, show

DOCS = ROOT / "benchmarks/README.md"
BEGIN, END = "<!-- figures: begin (python -m benchmarks --write-docs) -->", "<!-- figures: end -->"
LONG_BEGIN = "<!-- long rows: begin (python -m benchmarks --long --write-docs) -->"
LONG_END = "<!-- long rows: end -->"
ROWS = (
    "overhead", "in_process", "padded_loop", "vocabulary", "against_trl", "memory", "lora_runs", "groups", "grpo_loop",
    "async_rl", "tinker_door",
)  # fmt: skip
LONG_ROWS = ("real_shapes", "memory_cases", "many_runs", "engines", "async_engines")
"""Rows that take many minutes each."""
LIMIT_S = 1800.0


def run(row: str, repeats: int, smoke: bool) -> list[Figure] | str:
    """Run one row; return its figures, or the reason why there are none."""
    env = WAITING | {"HF_HUB_OFFLINE": "1"} | os.environ
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = [sys.executable, "-m", f"benchmarks.{row}", "--repeats", str(repeats), "--json", str(file)]
        try:
            done = subprocess.run(
                words + ["--smoke"] * smoke, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"took more than {LIMIT_S:g} s"
        if done.returncode or not file.exists():
            return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return [Figure(**figure) for figure in json.loads(file.read_text())]


def aim(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{'≥' if figure.at_least else '≤'} {figure.target:,g}"


def verdict(figure: Figure) -> str:
    return {None: "reported", True: "reached", False: "missed"}[figure.reached]


def rich_table(figures: list[Figure], failures: dict[str, str], words: str) -> Table:
    table = Table(title="gradwire", caption=words, show_lines=True)
    for name in ("figure", "measured", "target", "", "details"):
        table.add_column(name)
    for figure in figures:
        style = "red" if figure.reached is False else ""
        value = f"{show(figure.value)} {figure.unit}"
        table.add_row(figure.name, value, aim(figure), verdict(figure), figure.detail, style=style)
    for row, why in failures.items():
        table.add_row(row, "none", "", "failed", why, style="red")
    return table


def markdown(figures: list[Figure], failures: dict[str, str], words: str, repeats: int) -> str:
    """Format the table as Markdown."""
    lines = [f"{words}. Medians of {repeats} turns.", ""]
    lines += ["| figure | measured | target | | details |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {figure.name} | {show(figure.value)} {figure.unit} | {aim(figure)} | {verdict(figure)} | {figure.detail} |"
        for figure in figures
    ]
    lines += [f"| {row} | none | | failed | {why} |" for row, why in failures.items()]
    return "\n".join(lines)


def write_docs(text: str, begin: str, end: str) -> None:
    """Write the table between two markers of the page."""
    page = DOCS.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    DOCS.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*ROWS, *LONG_ROWS)
    parser.add_argument("--only", action="append", choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--long", action="store_true", help=f"{', '.join(LONG_ROWS)}, instead of the other rows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="every row at its smallest; the figures mean nothing")
    parser.add_argument("--json", type=Path, default=ROOT / "out/benchmarks.json", metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    if args.write_docs and (args.only or args.smoke):
        parser.error("--write-docs writes the whole table, as measured")

    console = Console()
    here = machine.describe()
    words = machine.in_words(here)
    console.print(words)
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for row in args.only or (LONG_ROWS if args.long else ROWS):
        start = time.perf_counter()
        measured = run(row, args.repeats, args.smoke)
        seconds[row] = time.perf_counter() - start
        if isinstance(measured, str):
            failures[row] = measured
            console.print(f"{row}: failed: {measured} ({seconds[row]:.0f} s)", markup=False)
            continue
        figures += measured
        for figure in measured:
            console.print(f"{figure.name}: {show(figure.value)} {figure.unit} ({seconds[row]:.0f} s)", markup=False)
    console.print(rich_table(figures, failures, words))
    report: dict[str, Any] = {"machine": here, "repeats": args.repeats, "seconds": seconds, "failures": failures}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report | {"figures": [asdict(figure) for figure in figures]}, indent=1) + "\n")
    if args.write_docs:
        text = markdown(figures, failures, words, args.repeats)
        begin, end = (LONG_BEGIN, LONG_END) if args.long else (BEGIN, END)
        write_docs(text, begin, end)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
