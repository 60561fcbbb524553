"""HTML report of a training: its curves, some sampled answers, all figures, its settings."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradwire
from gradwire.charts import STYLE as CHARTS
from gradwire.charts import chart
from gradwire.cli.text import money
from gradwire.html import cell, table
from gradwire.loop.loggers import read_jsonl
from gradwire.recipes.folder import next_steps

LOG = "metrics.jsonl"
"""The log of a training, in its folder."""
ANSWERS = "trajectories.jsonl"
"""Some of the answers that a training on rewards sampled, in its folder."""
LEADING = (
    "reward", "success", "loss", "preference_accuracy", "token_accuracy", "divergence", "reward_margin", "truncated",
    "entropy", "kl_divergence", "grad_norm",
)  # fmt: skip
"""Last parts of the metrics that say most, the first shown first."""
GROUPS = {
    "rewards": "Rewards", "eval": "Evaluation", "train": "Training", "rollouts": "Sampled answers", "time": "Time",
}  # fmt: skip
SHOWN_CURVES = 5
STYLE = (
    """body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#191e25}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:1.25rem 0 .5rem}.said{color:#525c69;margin:.25rem 0 1rem}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
td,th{padding:.25rem 1.25rem .25rem 0;border-bottom:1px solid #d8dde4;vertical-align:top}
td{overflow-wrap:anywhere;min-width:3rem}pre{overflow-x:auto}
.curves{display:grid;gap:1rem 2rem;grid-template-columns:repeat(auto-fill,minmax(min(22rem,100%),1fr))}
.curves.first>figure:first-child{grid-column:1/-1}.curves.first>figure:first-child .gw-area{height:17rem}
.answers{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(18rem,100%),1fr))}
.answers div{border-left:3px solid #0072b2;padding-left:.75rem;min-width:0}.answers p{margin:0;color:#525c69}
.asked,.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext}
.asked{border-left:3px solid #d8dde4;padding-left:.75rem;margin:.5rem 0 1rem}
summary{cursor:pointer;margin:1rem 0;font-weight:600}"""
    + CHARTS
)
UNITS = {
    "nll": "nats per token", "perplexity": "per token", "token_accuracy": "share of tokens",
    "preference_accuracy": "share of pairs", "grad_norm": "before clipping", "engine_s": "seconds",
    "tokens": "per step", "kl_divergence": "nats per token", "entropy": "nats per token",
    "divergence": "nats per token", "success": "share of problems", "kl": "nats", "iteration_s": "seconds",
    "truncated": "answers", "completed": "answers",
}  # fmt: skip


async def used_by(service: gradwire.ServiceClient, run: gradwire.TrainingClient) -> str:
    """Return what a run has used so far, and what that cost where the server has a price."""
    info, server = await run.info(), await service.server_info()
    price = (
        f", {money(server.cost(info.engine_s))} at {server.price_per_hour:g} an hour" if server.price_per_hour else ""
    )
    return f"{info.num_tokens:,} tokens, {info.engine_s:,.0f} s of an engine{price}"


def write_report(folder: Path, title: str, settings: Mapping[str, Any], used: str = "") -> Path:
    """Write ``report.html`` from ``metrics.jsonl``; return its path. Of absolute paths it has the last part alone.

    Args:
        used: The training's usage.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in read_jsonl(folder / LOG) if (folder / LOG).exists() else ():
        for name, value in line.items():
            if name not in ("iteration", "time") and isinstance(value, int | float):
                curves.setdefault(name, []).append((line["iteration"], value))
    steps = next_steps(folder)
    drawn = [plot_several(name, parts) for name, parts in _charts(curves)]
    length = max((step for points in curves.values() for step, _ in points), default=0)
    shown = {name: without_path(value) for name, value in settings.items()}
    going_on = html.escape("\n".join(steps).replace(str(folder), without_path(str(folder))))
    body = [
        f"<h1>{html.escape(title)} of {html.escape(str(shown['model']))}</h1>",
        f'<p class="said">{" · ".join(filter(None, (f"{length:,} steps", used)))}</p>',
        f'<div class="curves first">{"".join(drawn[:SHOWN_CURVES])}</div>',
        _answers(folder / ANSWERS),
        _folded("All other curves", f'<div class="curves">{"".join(drawn[SHOWN_CURVES:])}</div>'),
        _folded("All figures", "".join(_figures(curves))),
        _folded("Settings", table(("setting", "value"), list(shown.items()))),
        _folded("Go on", f"<pre>{going_on}</pre>") if steps else "",
    ]
    file = folder / "report.html"
    file.write_text(page_of(title, "".join(body)), encoding="utf-8")
    return file


def without_path(value: Any) -> Any:
    """A setting's value; of an absolute path the last part."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _charts(curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[tuple[str, dict[str, list[tuple[int, float]]]]]:
    """Curves by chart, the telling ones first: training and evaluation of a metric in one, none that is constant."""
    charts: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, points in curves.items():
        group, _, last = name.partition("/")
        if len({y for _, y in points}) > 1:
            joined = last if {f"train/{last}", f"eval/{last}"} <= {*curves} and group in ("train", "eval") else name
            charts.setdefault(joined, {})[group if joined == last else ""] = list(points)

    def place(name: str) -> tuple[int, int, str]:
        group, _, last = name.rpartition("/")
        groups = [*GROUPS]
        return (
            LEADING.index(last) if last in LEADING else len(LEADING),
            groups.index(group) if group in groups else len(groups),
            name,
        )

    return sorted(charts.items(), key=lambda chart: place(chart[0]))


def _figures(curves: Mapping[str, Sequence[tuple[int, float]]]) -> list[str]:
    """A table of first and last values for each group of metrics."""
    groups: dict[str, list[tuple[str, float, float, str]]] = {each: [] for each in GROUPS.values()}
    for name, points in sorted(curves.items()):
        group = GROUPS.get(name.partition("/")[0], "Other")
        groups.setdefault(group, []).append((name, points[0][1], points[-1][1], unit_of(name)))
    head = ("metric", "first", "last", "unit")
    return [f"<h3>{group}</h3>{table(head, rows)}" for group, rows in groups.items() if rows]


def _answers(file: Path) -> str:
    """The answers that were kept of the first and of the last iteration, those to a problem side by side."""
    kept = read_jsonl(file) if file.exists() else []
    if not kept:
        return ""
    ends = {kept[0]["iteration"], kept[-1]["iteration"]}
    asked: dict[tuple[int, str], list[str]] = {}
    for each in kept:
        if each["iteration"] in ends:
            for step in each["steps"][-1:]:
                asked.setdefault((each["iteration"], step["observation"]), []).append(_answer(each, step))
    body = "".join(
        f'<h3>Iteration {iteration}</h3><div class="asked">{html.escape(problem)}</div>'
        f'<div class="answers">{"".join(answers)}</div>'
        for (iteration, problem), answers in asked.items()
    )
    return f"<h2>Some answers, first and last iteration</h2>{body}"


def _answer(record: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """An answer under its reward, with the reason of the reward and what ended it."""
    said = [f"reward {cell(record['reward'])}", str(record.get("reason", "")), _ending(record, step)]
    text = f'<span class="text">{html.escape(step["action"])}</span>'
    return f"<div><p>{html.escape(' · '.join(filter(None, said)))}</p>{text}</div>"


def _ending(record: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    return record["error"] or ("cut" if "truncated" in record["status"] or step["stop_reason"] == "length" else "")


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def unit_of(name: str) -> str:
    """Return the unit of a metric; "" if it has none that is known."""
    return UNITS.get(name.rpartition("/")[2], "")


def plot_several(name: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw one metric of several trainings over the steps; a legend names those that have a name."""
    shown = {each: [(x, y) for x, y in points if math.isfinite(y)] for each, points in curves.items()}
    return chart(name, shown, unit=unit_of(name))


def page_of(title: str, body: str) -> str:
    """A whole page in the reports' style."""
    return (
        '<!doctype html><html lang="en"><meta charset=utf-8><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>{body}"
    )
