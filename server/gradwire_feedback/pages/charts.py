"""Charts of the policies page, as options of Apache ECharts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_shell.components import Curve, named
from nicegui import ui

from gradwire_feedback.api.schemas import ComparisonOut

BLUE, BAND, POINT, EDGE = "#2b86c5", "#5b97c4", "#0b3d63", "#7a828c"
"""At least 3:1 against the surfaces of both themes, and the point against its band. Texts have the theme's colour."""
AXIS = {
    "axisLine": {"lineStyle": {"color": EDGE}}, "axisTick": {"lineStyle": {"color": EDGE}},
    "splitLine": {"lineStyle": {"color": EDGE, "opacity": 0.3}},
}  # fmt: skip


class Chart(ui.echart):
    """A chart in the theme's colours, named for screen readers; without options it is hidden."""

    def __init__(self, name: str) -> None:
        super().__init__({}, renderer="svg")
        named(self, name).classes("gw-chart").props("role=img")

    def show(self, options: Mapping[str, Any]) -> None:
        """Show other data."""
        self.options.clear()
        self.options.update(options)
        self.set_visibility(bool(options))
        self.update()


def histogram(counts: Sequence[int]) -> dict[str, Any]:
    """Histogram of scores in bins of equal width over 0..1."""
    width = 1 / len(counts)
    return {
        "grid": {"left": 40, "right": 10, "top": 20, "bottom": 40},
        "xAxis": {
            "type": "category", "name": "score", "nameLocation": "middle", "nameGap": 26, **AXIS,
            "data": [f"{i * width:.1f}–{(i + 1) * width:.1f}" for i in range(len(counts))],
        },
        "yAxis": {"type": "value", "minInterval": 1, **AXIS},
        "tooltip": {},
        "series": [{"type": "bar", "data": list(counts), "itemStyle": {"color": BLUE}, "barCategoryGap": "10%"}],
        "animation": False,
    }  # fmt: skip


def curves(histories: Mapping[str, Sequence[float]]) -> list[Curve]:
    """Mean reward per step, one curve per version."""
    return [
        Curve(version, [(step, round(value, 4)) for step, value in enumerate(history, 1)], colour)
        for colour, (version, history) in enumerate(histories.items())
    ]


def intervals(comparison: ComparisonOut) -> dict[str, Any]:
    """Mean score and interval of each version."""
    names = [each.version for each in comparison.versions][::-1]
    rows = comparison.versions[::-1]
    return {
        "grid": {"left": 70, "right": 30, "top": 10, "bottom": 40},
        "xAxis": {
            "type": "value", "min": 0, "max": 1, "name": "score", "nameLocation": "middle", "nameGap": 26,
            **AXIS,
        },
        "yAxis": {"type": "category", "data": names, **AXIS},
        "series": [
            {
                "type": "bar", "stack": "interval", "silent": True, "itemStyle": {"color": "transparent"},
                "data": [each.interval[0] for each in rows],
            },
            {
                "type": "bar", "stack": "interval", "barWidth": 14,
                "itemStyle": {"color": BAND, "borderRadius": 7},
                "data": [each.interval[1] - each.interval[0] for each in rows],
            },
            {
                "type": "scatter", "symbolSize": 14,
                "itemStyle": {"color": POINT, "borderColor": "#ffffff", "borderWidth": 2},
                "data": [[each.mean, each.version] for each in rows if each.mean is not None],
            },
        ],
        "animation": False,
    }  # fmt: skip
