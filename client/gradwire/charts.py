"""Curves as HTML that needs no script, and which differences of a metric's values mean something."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROUNDING, NOTHING = 1e-4, 1e-10
"""Relative range of a metric, and its size, below which its curve shows the rounding of a model's numbers: a token's
log-probability is a sum of products in float32, of factors in 16 bits as a rule, and a KL the square of such errors."""
NO_LOSS = 1e-6
"""Size below which a loss is zero but for rounding: a policy's, of answers that it has just sampled, is a mean in
float32 of advantages of both signs."""
COLOURS = ("#0072b2", "#c25100", "#007a5a", "#a03c85", "#7d6400", "#525c69", "#3b4cc0", "#7a3b1d")
MOST_TICKS = 5
SIZE = 1000
"""Width and height of the drawing, which is stretched to its place; labels and lines are not."""
STYLE = """figure.gw-drawn{margin:0;min-width:0}.gw-drawn figcaption{font-weight:600;unicode-bidi:plaintext;
overflow-wrap:anywhere}.gw-drawn small{font-weight:400;opacity:.8}.gw-drawn ul{list-style:none;margin:.2rem 0;padding:0;
display:flex;flex-wrap:wrap;gap:0 1rem;font-size:.85em}.gw-drawn li{unicode-bidi:plaintext;overflow-wrap:anywhere}
.gw-drawn li::before{content:"";display:inline-block;width:1rem;height:3px;vertical-align:middle;margin-right:.4rem;
background:var(--c)}.gw-area{position:relative;height:11rem;margin:.6rem .9rem 2.6rem 3.7rem}
.gw-area svg{position:absolute;width:100%;height:100%;overflow:visible}.gw-area polyline{fill:none;stroke-width:1.75;
stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}.gw-area polyline.dot{stroke-width:6}
.gw-area line{stroke:#8884;vector-effect:non-scaling-stroke}.gw-area i{position:absolute;font:normal 11px/1 system-ui,
sans-serif;opacity:.8;white-space:nowrap}.gw-area i.y{right:calc(100% + .5rem);transform:translateY(-50%)}
.gw-area i.x{top:calc(100% + .5rem);transform:translateX(-50%)}.gw-area i.name{top:calc(100% + 1.5rem);left:50%;
transform:translateX(-50%)}"""


def is_rounding(metric: str, value: float) -> bool:
    """Whether a metric's value is so small that it is zero but for rounding."""
    return abs(value) < (NO_LOSS if "loss" in metric else NOTHING)


def text_of(metric: str, value: float, digits: int) -> str:
    """A metric's value; "≈ 0" for one that is rounding alone."""
    return "≈ 0" if value and is_rounding(metric, value) else f"{value:.{digits}g}"


@dataclass(frozen=True)
class Flat:
    """An axis for curves whose differences mean nothing.

    Attributes:
        low, high: Ends of the axis, on which they are level.
        reason: Why, in words; "" where all values are the same.
    """

    low: float
    high: float
    reason: str


def flat(curves: Sequence[Sequence[Sequence[float]]], metric: str) -> Flat | None:
    """The axis for a metric's curves, given as pairs, that differ by rounding alone; None for curves with real
    differences."""
    values = [y for points in curves for _, y in points]
    low, high = min(values, default=math.nan), max(values, default=math.nan)
    size = max(abs(low), abs(high))
    if is_rounding(metric, size):
        return Flat(-1.0, 1.0, f"at most {size:.1g}, drawn as 0: rounding" if size else "")
    if not high - low <= ROUNDING * size:
        return None
    reason = f"{low:.7g} to {high:.7g}, drawn flat: about rounding" if high > low else ""
    unit = 10.0 ** math.floor(math.log10(2 * size))
    end = math.ceil(2 * size / unit - 1e-9) * unit  # about twice the values, in one digit
    return Flat(0.0, end, reason) if high > 0 else Flat(-end, 0.0, reason)


def spacing(low: float, high: float, *, least: float = 0.0) -> float:
    """The distance between an axis' ticks: 1, 2 or 5 times a power of ten, for at most ``MOST_TICKS`` gaps."""
    wanted = max((high - low) / MOST_TICKS, least) or 1.0
    unit = 10.0 ** math.floor(math.log10(wanted))
    return next((n * unit for n in (1, 2, 5) if n * unit >= wanted * (1 - 1e-9)), 10 * unit)


def chart(name: str, curves: Mapping[str, Sequence[Sequence[float]]], *, unit: str = "") -> str:
    """Draw a metric of one or several trainings over the steps; "" where there is nothing to draw.

    Args:
        curves: Name of each training -> its finite values as pairs with their steps. Names are in a legend; "": none.
        unit: What the metric is measured in.
    """
    points = [(float(x), float(y)) for curve in curves.values() for x, y in curve]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    level = flat(list(curves.values()), name)
    low, high = (level.low, level.high) if level else (min(y for _, y in points), max(y for _, y in points))
    gap, pace = spacing(low, high), spacing(left, right, least=1.0)
    low, high = math.floor(low / gap + 1e-9) * gap, math.ceil(high / gap - 1e-9) * gap
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def at(x: float, y: float) -> str:
        return f"{SIZE * (x - left) / across:.0f},{SIZE * (high - y) / up:.0f}"

    lines, labels, legend = "", "", ""
    for number in range(round(up / gap) + 1):
        y = low + number * gap
        height = 100 * (high - y) / up
        lines += f'<line x1="0" x2="{SIZE}" y1="{SIZE * height / 100:.0f}" y2="{SIZE * height / 100:.0f}"/>'
        labels += f'<i class="y" style="top:{height:.4g}%">{_tick(y, gap)}</i>'
    for number in range(math.ceil(left / pace - 1e-9), math.floor(right / pace + 1e-9) + 1):
        labels += f'<i class="x" style="left:{100 * (number * pace - left) / across:.4g}%">{number * pace:,.0f}</i>'
    for number, (each, curve) in enumerate(curves.items()):
        colour, drawn = COLOURS[number % len(COLOURS)], [at(x, y) for x, y in curve]
        dot = ' class="dot"' if len(drawn) == 1 else ""
        lines += f'<polyline{dot} stroke="{colour}" points="{" ".join(drawn * 2 if dot else drawn)}"/>' if drawn else ""
        legend += f'<li style="--c:{colour}">{html.escape(each)}</li>' if each and drawn else ""
    said = " · ".join(filter(None, (unit, level.reason if level else "")))
    return (
        f'<figure class="gw-drawn"><figcaption>{html.escape(name)}{f" <small>{said}</small>" if said else ""}'
        f"</figcaption>{f'<ul>{legend}</ul>' if legend else ''}"
        f'<div class="gw-area"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(name)}">{lines}</svg>{labels}<i class="name">step</i></div></figure>'
    )


def _tick(value: float, gap: float) -> str:
    """A label of an axis without the digits that rounding left."""
    return f"{round(value / gap) * gap:.6g}"
