"""HTML report of a training: its curves, some sampled answers, all figures, its settings."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradwire
from gradwire.cli.text import money
from gradwire.html import table
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
WIDTH, HEIGHT, MARGIN = 420, 150, 46
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem;overflow-wrap:anywhere}table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
td,th{padding:.2rem .9rem .2rem 0;border-bottom:1px solid #ddd}pre{overflow-x:auto}
.curves{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(20rem,100%),1fr))}
figure{margin:0}.curves>figure:first-child{grid-column:1/-1}svg{background:#fafafa;width:100%;height:auto}
svg text{font-size:11px;fill:#555}.curves>figure:first-child svg text{font-size:8px}
summary{cursor:pointer;margin:1rem 0;font-weight:600}td{vertical-align:top;white-space:pre-wrap}"""
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
    shown = {name: without_path(value) for name, value in settings.items()}
    going_on = html.escape("\n".join(steps).replace(str(folder), without_path(str(folder))))
    body = [
        f"<h1>{html.escape(title)} of {html.escape(str(shown['model']))}</h1>",
        f'<div class="curves">{"".join(drawn[:SHOWN_CURVES])}</div>',
        f"<p>Used: {used}.</p>" if used else "",
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
    """The answers that were kept of the first and of the last iteration."""
    kept = read_jsonl(file) if file.exists() else []
    if not kept:
        return ""
    ends = {kept[0]["iteration"], kept[-1]["iteration"]}
    rows = [
        (each["iteration"], step["observation"], step["action"], each["reward"], _ending(each, step))
        for each in kept
        if each["iteration"] in ends
        for step in each["steps"][-1:]
    ]
    head = ("iteration", "problem", "answer", "reward", "ended")
    return f"<h2>Some answers, first and last iteration</h2>{table(head, rows)}"


def _ending(record: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    return record["error"] or ("cut" if "truncated" in record["status"] or step["stop_reason"] == "length" else "")


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def unit_of(name: str) -> str:
    """Return the unit of a metric; "" if it has none that is known."""
    return UNITS.get(name.rpartition("/")[2], "")


COLOURS = ("#2a6fb0", "#c44e1c", "#2f8f4e", "#8a4fb0", "#a08000", "#c03a7a", "#3a8f95", "#777777")


def plot_several(name: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw one metric of several trainings over the steps; a legend names those that have a name."""
    shown = {each: [(x, y) for x, y in points if math.isfinite(y)] for each, points in curves.items()}
    every = [point for points in shown.values() for point in points]
    if all(len(points) < 2 for points in shown.values()):
        return ""
    (left, right), (low, high) = (min(x for x, _ in every), max(x for x, _ in every)), (
        min(y for _, y in every), max(y for _, y in every),
    )  # fmt: skip
    across, up = (WIDTH - 2 * MARGIN) / max(right - left, 1), (HEIGHT - MARGIN) / ((high - low) or 1)
    lines, legend = "", ""
    for place, (each, points) in enumerate(shown.items()):
        path = " ".join(f"{MARGIN + (x - left) * across:.1f},{HEIGHT - 26 - (y - low) * up:.1f}" for x, y in points)
        colour = COLOURS[place % len(COLOURS)]
        lines += f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>'
        if each:
            legend += f'<br><span style="color:{colour}">&#9644;</span> {html.escape(each)}'
    unit = unit_of(name)
    caption = html.escape(f"{name} ({unit})" if unit else name)
    return (
        f'<figure><figcaption>{caption}{legend}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{caption}">{lines}'
        f'<text x="2" y="22">{high:.4g}</text><text x="2" y="{HEIGHT - 26}">{low:.4g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 8}">{left}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end">{right} steps</text></svg></figure>'
    )


def page_of(title: str, body: str) -> str:
    """A whole page in the reports' style."""
    return (
        '<!doctype html><html lang="en"><meta charset=utf-8><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>{body}"
    )
