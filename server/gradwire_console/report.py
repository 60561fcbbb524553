"""A comparison of runs as one HTML file that needs nothing else: curves as SVG, final figures, settings that differ."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire import RunInfo

from gradwire_console.series import LARGE, Record, flat

WIDTH, HEIGHT, EDGE = 520, 200, 44
FIRST = 2
"""Curves that come before all else."""
COLOURS = ("#0072b2", "#c25100", "#007a5a", "#a03c85", "#7d6400", "#525c69", "#3b4cc0", "#7a3b1d")
STYLE = """body{font:14px/1.5 system-ui,sans-serif;color:#191e25;background:#fff;margin:2rem auto;max-width:72rem;
padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.3rem .8rem;border-bottom:1px solid #d8dde4;text-align:left}
td+td,th+th{text-align:right;font-variant-numeric:tabular-nums}.plots{display:flex;flex-wrap:wrap;gap:1rem}
h1,p{overflow-wrap:anywhere}td,th{max-width:16rem;overflow-wrap:break-word}.wide{overflow-x:auto}
figure{margin:0;max-width:100%;flex:1 1 22rem}figcaption{font-weight:600}
svg{background:#f6f7f9;width:100%;height:auto}p{color:#525c69}
.key{display:inline-block;width:1rem;height:3px;vertical-align:middle;margin-right:.4rem}"""


def page(
    records: Mapping[str, Record], infos: Sequence[RunInfo], differences: Sequence[tuple[str, Sequence[str]]]
) -> str:
    """Write the report.

    Args:
        records: Label of each run -> what it measured, in the order of ``infos``.
        differences: Settings that differ: their name, and a value a run.
    """
    labels = list(records)
    there = {name for record in records.values() for name in record.metrics}
    names = sorted(there, key=lambda name: (LARGE.index(name) if name in LARGE else len(LARGE), name))
    keys = " ".join(
        f'<span class="key" style="background:{COLOURS[n % len(COLOURS)]}"></span>{_text(label)}'
        for n, label in enumerate(labels)
    )
    lasts = [record.last for record in records.values()]
    figures = [(name, [last[name].text(5) if name in last else "" for last in lasts]) for name in names]
    own = [
        ("run", [info.run_id for info in infos]),
        ("base model", [info.base_model for info in infos]),
        ("steps", [f"{info.step:,}" for info in infos]),
    ]
    plots = [plot(name, [record.curve(name) for record in records.values()]) for name in names]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>gradwire: comparison</title>'
        f"<style>{STYLE}</style></head><body><h1>{', '.join(map(_text, labels))}</h1>"
        f"<p>{keys}<br>written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}</p>"
        f'<div class="plots">{"".join(plots[:FIRST])}</div>'
        f"<h2>Runs</h2>{_table(labels, own)}<h2>Settings that differ</h2>"
        f"{_table(labels, differences) if differences else '<p>None.</p>'}"
        f"<h2>Last figures</h2>{_table(labels, figures)}"
        f'<h2>Further curves</h2><div class="plots">{"".join(plots[FIRST:])}</div></body></html>'
    )


def _text(value: object) -> str:
    return f"<bdi>{html.escape(str(value))}</bdi>"


def _table(labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    def cells(values: Sequence[str], tag: str = "td") -> str:
        return "".join(f"<{tag}>{_text(value)}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells([name, *values])}</tr>" for name, values in rows)
    head = cells(["", *labels], "th")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def plot(name: str, curves: Sequence[Sequence[Sequence[float]]]) -> str:
    """Draw a metric of several runs over the steps as SVG; "" if there is nothing to draw."""
    points: list[Any] = [point for curve in curves for point in curve]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    level = flat(curves, name)
    low, high = (level.low, level.high) if level else (min(y for _, y in points), max(y for _, y in points))
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def at(x: float, y: float) -> str:
        place = EDGE + (x - left) / across * (WIDTH - EDGE - 8)
        return f"{place:.1f},{HEIGHT - 22 - (y - low) / up * (HEIGHT - 32):.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{COLOURS[n % len(COLOURS)]}" stroke-width="1.6" '
        f'points="{" ".join(at(x, y) for x, y in curve)}"/>'
        for n, curve in enumerate(curves)
        if curve
    )
    marks = (
        f'<text x="4" y="14">{high:.4g}</text><text x="4" y="{HEIGHT - 22}">{low:.4g}</text>'
        f'<text x="{EDGE}" y="{HEIGHT - 6}">{left:.0f}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">step {right:.0f}</text>'
    )
    said = f"<br><small>{level.reason}</small>" if level and level.reason else ""
    return (
        f"<figure><figcaption>{_text(name)}{said}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" font-size="10" '
        f'fill="#525c69" role="img" aria-label="{html.escape(name)}">{marks}{lines}</svg></figure>'
    )
