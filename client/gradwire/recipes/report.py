"""HTML report of a training: model, settings, last metrics and curves."""

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
WIDTH, HEIGHT, MARGIN = 420, 150, 46
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .9rem;border-bottom:1px solid #ddd}
figure{display:inline-block;margin:.5rem}svg{background:#fafafa}svg text{font-size:11px;fill:#555}"""
UNITS = {
    "loss": "the loss's own unit; nats per token for causal_lm", "nll": "nats per token", "perplexity": "per token",
    "token_accuracy": "share of tokens", "preference_accuracy": "share of pairs", "reward_margin": "reward",
    "grad_norm": "before clipping", "engine_s": "seconds", "tokens": "per step", "kl_divergence": "nats per token",
    "entropy": "nats per token", "divergence": "nats per token", "success": "share of tasks", "kl": "nats",
    "iteration_s": "seconds",
}  # fmt: skip


async def used_by(service: gradwire.ServiceClient, run: gradwire.TrainingClient) -> str:
    """Return what a run has used so far, and what that cost where the server has a price."""
    info, server = await run.info(), await service.server_info()
    price = (
        f", {money(server.cost(info.engine_s))} at {server.price_per_hour:g} an hour" if server.price_per_hour else ""
    )
    return f"{info.num_tokens:,} tokens, {info.engine_s:,.0f} s of an engine{price}"


def write_report(folder: Path, title: str, settings: Mapping[str, Any], used: str = "") -> Path:
    """Write ``report.html`` from ``metrics.jsonl``; return its path.

    Args:
        used: What the training used.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in read_jsonl(folder / LOG) if (folder / LOG).exists() else ():
        for name, value in line.items():
            if name not in ("iteration", "time") and isinstance(value, int | float):
                curves.setdefault(name, []).append((line["iteration"], value))
    steps = next_steps(folder)
    rows = [(name, points[0][1], points[-1][1], unit_of(name)) for name, points in sorted(curves.items())]
    body = [
        f"<h1>{html.escape(title)} of {html.escape(str(settings['model']))}</h1>",
        table(("metric", "first", "last", "unit"), rows),
        *(plot(name, points) for name, points in sorted(curves.items()) if len(points) > 1),
        f"<p>Used: {used}.</p>" if used else "",
        "<h2>Go on</h2><pre>" + html.escape("\n".join(steps)) + "</pre>" if steps else "",
        "<h2>Settings</h2>",
        table(("setting", "value"), list(settings.items())),
    ]
    file = folder / "report.html"
    file.write_text(page_of(title, "".join(body)), encoding="utf-8")
    return file


def unit_of(name: str) -> str:
    """Return the unit of a metric; "" if it has none that is known."""
    return UNITS.get(name.rpartition("/")[2], "")


COLOURS = ("#2a6fb0", "#c44e1c", "#2f8f4e", "#8a4fb0", "#a08000", "#c03a7a", "#3a8f95", "#777777")


def plot(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Draw one metric over the steps."""
    return plot_several(name, {"": points})


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
        f'<figure><figcaption>{caption}{legend}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{caption}">{lines}'
        f'<text x="2" y="22">{high:.4g}</text><text x="2" y="{HEIGHT - 26}">{low:.4g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 8}">{left}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end">{right} steps</text></svg></figure>'
    )


def page_of(title: str, body: str) -> str:
    """A whole page in the reports' style."""
    return f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>{body}"
