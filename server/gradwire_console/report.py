"""A comparison of runs as one HTML file that needs nothing else: curves as SVG, final figures, settings that differ."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence

from gradwire import RunInfo
from gradwire.charts import STYLE as CHARTS
from gradwire.charts import chart
from gradwire.recipes.report import unit_of

from gradwire_console.series import LARGE, Record

FIRST = 2
"""Curves that come before all else."""
STYLE = (
    """body{font:14px/1.5 system-ui,sans-serif;color:#191e25;background:#fff;margin:2rem auto;max-width:72rem;
padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.3rem .8rem;border-bottom:1px solid #d8dde4;text-align:left}
td+td,th+th{text-align:right;font-variant-numeric:tabular-nums}
h1,p{overflow-wrap:anywhere}td,th{max-width:16rem;overflow-wrap:break-word}.wide{overflow-x:auto}
.plots{display:grid;gap:1rem 2rem;grid-template-columns:repeat(auto-fill,minmax(min(24rem,100%),1fr))}
.plots.first{grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr))}.first .gw-area{height:17rem}
p{color:#525c69}"""
    + CHARTS
)


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
    lasts = [record.last for record in records.values()]
    figures = [(name, [last[name].text(5) if name in last else "" for last in lasts]) for name in names]
    own = [
        ("run", [info.run_id for info in infos]),
        ("base model", [info.base_model for info in infos]),
        ("steps", [f"{info.step:,}" for info in infos]),
    ]
    several = len(records) > 1
    plots = [
        chart(name, {label if several else "": each.curve(name) for label, each in records.items()}, unit=unit_of(name))
        for name in names
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>gradwire: comparison</title>'
        f"<style>{STYLE}</style></head><body><h1>{', '.join(map(_text, labels))}</h1>"
        f"<p>Written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}</p>"
        f'<div class="plots first">{"".join(plots[:FIRST])}</div>'
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
