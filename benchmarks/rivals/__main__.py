"""The table of rivals: ``python -m benchmarks.rivals``, or ``make rivals``; under 8 minutes on two idle cores.

    python -m benchmarks.rivals [--rival NAME …] [--only WORK …] [--repeats 5] [--smoke] [--json FILE] [--write-docs]

A rival that fails or whose environment is missing is a line of the table that says why. ``--write-docs`` puts the table
into ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import ROOT, machine
from benchmarks.__main__ import markdown, write_docs
from benchmarks.report import Figure, Size, line
from benchmarks.rivals.compare import RIVALS, compare
from benchmarks.rivals.workload import WORKS

BEGIN, END = "<!-- rivals: begin (make rivals ARGS=--write-docs) -->", "<!-- rivals: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rival.name for rival in RIVALS]
    parser.add_argument("--rival", action="append", choices=names, metavar="NAME", help=", ".join(names))
    works = [work.name for work in WORKS]
    parser.add_argument("--only", action="append", choices=works, default=[], metavar="WORK", help=", ".join(works))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="two steps a turn; the figures mean nothing")
    parser.add_argument("--json", type=Path, default=ROOT / "out/rivals.json", metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    if args.write_docs and (args.rival or args.only or args.smoke):
        parser.error("--write-docs writes the whole table, as measured")

    here = machine.describe()
    words = machine.in_words(here)
    print(words, flush=True)
    size = Size(args.repeats, args.smoke, tuple(args.only))
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    for rival in RIVALS:
        if rival.name not in (args.rival or names):
            continue
        start = time.perf_counter()
        try:
            measured = asyncio.run(compare(rival, size))
        except (RuntimeError, AssertionError, OSError) as error:
            failures[rival.name] = str(error).strip().splitlines()[-1]
            print(f"{rival.name}: failed: {error}", flush=True)
            continue
        for figure in measured:
            print(line(figure), flush=True)
        print(f"{rival.name}: {time.perf_counter() - start:.0f} s", flush=True)
        figures += measured
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": here, "repeats": args.repeats, "failures": failures}
    args.json.write_text(json.dumps(report | {"figures": [asdict(figure) for figure in figures]}, indent=1) + "\n")
    if args.write_docs:
        write_docs(markdown(figures, failures, words, args.repeats), BEGIN, END)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
