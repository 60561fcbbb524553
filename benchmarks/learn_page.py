"""The page that ``benchmarks.learn`` makes: a table, curves, and how to repeat them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from benchmarks import ROOT

PAGE, PICTURE, FIGURES = (ROOT / each for each in ("docs/results.md", "docs/results.svg", "benchmarks/learn.json"))
WIDTH, HEIGHT, LEFT, TOP, BELOW = 300, 190, 46, 34, 26
COLUMNS = 3
OURS, THEIRS = "#2a6fb0", "#c44e1c"
GRADED = {
    "last_number": "the number is right", "marked": "they end in `#### N`, as they were taught",
    "ended": "they end before they are cut", "of_ended": "the reward model's own score of those that end",
}  # fmt: skip
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def write_page(lessons: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the figures, the picture and the table of ``docs/results.md``, between its marks."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    kept = {name: (kept | results)[name] for name in lessons if name in {*kept, *results}}
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n")
    PICTURE.write_text(picture(lessons, kept))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown = f"![learning curves, TRL's losses beside them]({PICTURE.name})\n\n{table(lessons, kept)}"
    PAGE.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}")


def table(lessons: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each lesson, in Markdown."""
    lines = [
        "| recipe | learns | rate chosen | metric | before → after | must reach | largest difference to TRL's loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, lesson in lessons.items():
        result, must = results.get(name), f"{'+' if lesson.gain else ''}{lesson.reach:g}"
        if result is None:
            lines.append(f"| `{name}` | {lesson.says} | - | `{lesson.metric}` | not run yet | {must} | - |")
            continue
        ours = [value for _, value in result["curves"]["train/loss"]] if result["trl"] else []
        apart = (
            f"{max(abs(a - b) for a, b in zip(ours, result['trl'])):.1g} in {len(result['trl'])} steps" if ours else "-"
        )
        lines.append(
            f"| `{name}` | {lesson.says} | {result['rates'][0]:.2g} | `{lesson.metric}` | {result['first']:.3f} → "
            f"**{result['last']:.3f}** | {must} | {apart} |"
        )
        for grader, cells in result["graded"].items():
            what = f"answers to {result['questions']} held-out questions: {GRADED[grader]}"
            lines.append(f"| | | | {what} | {' → '.join(cells)} | | |")
    return "\n".join(lines)


def picture(lessons: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The curves of all lessons: the loss of each step where TRL has one, else the lesson's metric."""
    panels = []
    for name, result in results.items():
        metric = "train/loss" if lessons[name].trl else lessons[name].metric
        curves = {"gradwire": result["curves"][metric]}
        if result["trl"]:
            curves["TRL"] = [(step, loss) for (step, _), loss in zip(curves["gradwire"], result["trl"])]
        panels.append((f"{name}: {metric}", curves))
    rows = -(-len(panels) // COLUMNS)
    drawn = ""
    for place, (title, curves) in enumerate(panels):
        across, down = WIDTH * (place % COLUMNS), HEIGHT * (place // COLUMNS)
        drawn += f'<g transform="translate({across},{down})">{panel(title, curves)}</g>'
    width, height = WIDTH * min(COLUMNS, max(len(panels), 1)), HEIGHT * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Learning curves"><style>text{{font:11px system-ui,sans-serif;fill:#555}}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{drawn}</svg>\n'
    )


def panel(title: str, curves: Mapping[str, list[tuple[int, float]]]) -> str:
    """One chart; TRL's curve is dashed."""
    points = [point for curve in curves.values() for point in curve]
    (x0, x1), (y0, y1) = ((min(each), max(each)) for each in zip(*points))
    across, up = (WIDTH - LEFT - 16) / ((x1 - x0) or 1), (HEIGHT - TOP - BELOW) / ((y1 - y0) or 1)
    drawn = f'<text x="{LEFT}" y="16" style="font-weight:600;fill:#222">{html.escape(title)}</text>'
    for name, curve in curves.items():
        path = " ".join(f"{LEFT + (x - x0) * across:.1f},{HEIGHT - BELOW - (y - y0) * up:.1f}" for x, y in curve)
        style = f'stroke="{THEIRS}" stroke-dasharray="5 4"' if name == "TRL" else f'stroke="{OURS}"'
        drawn += f'<polyline fill="none" stroke-width="2" {style} points="{path}"/>'
    if len(curves) > 1:
        drawn += f'<text x="{WIDTH - 16}" y="16" text-anchor="end">TRL dashed</text>'
    return drawn + (
        f'<text x="4" y="{TOP + 4}">{y1:.3g}</text><text x="4" y="{HEIGHT - BELOW}">{y0:.3g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{x0}</text>'
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 8}" text-anchor="end">{x1} steps</text>'
    )
