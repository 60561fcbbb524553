"""Charts of the policies page, as options of Apache ECharts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_feedback.api.schemas import ComparisonOut

COLOURS = ["#1976d2", "#e07b00", "#2e7d32", "#8e24aa", "#c62828", "#00838f", "#6d4c41", "#546e7a"]


def histogram(counts: Sequence[int]) -> dict[str, Any]:
    """Histogram of scores in bins of equal width over 0..1."""
    width = 1 / len(counts)
    return {
        "grid": {"left": 40, "right": 10, "top": 20, "bottom": 40},
        "xAxis": {
            "type": "category", "name": "score", "nameLocation": "middle", "nameGap": 26,
            "data": [f"{i * width:.1f}–{(i + 1) * width:.1f}" for i in range(len(counts))],
        },
        "yAxis": {"type": "value", "minInterval": 1},
        "tooltip": {},
        "series": [{"type": "bar", "data": list(counts), "itemStyle": {"color": COLOURS[0]}, "barCategoryGap": "10%"}],
        "animation": False,
    }  # fmt: skip


def curves(histories: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Mean reward per step, one line per version."""
    return {
        "color": COLOURS,
        "grid": {"left": 50, "right": 10, "top": 30, "bottom": 40},
        "legend": {"data": list(histories), "top": 0},
        "xAxis": {"type": "value", "name": "step", "nameLocation": "middle", "nameGap": 26, "minInterval": 1},
        "yAxis": {"type": "value", "scale": True},
        "tooltip": {"trigger": "axis"},
        "series": [
            {
                "name": version, "type": "line", "showSymbol": len(history) < 30,
                "data": [[step, round(value, 4)] for step, value in enumerate(history, 1)],
            }
            for version, history in histories.items()
        ],
        "animation": False,
    }  # fmt: skip


def intervals(comparison: ComparisonOut) -> dict[str, Any]:
    """Mean score and interval of each version."""
    names = [each.version for each in comparison.versions][::-1]
    rows = comparison.versions[::-1]
    return {
        "grid": {"left": 70, "right": 30, "top": 10, "bottom": 40},
        "xAxis": {"type": "value", "min": 0, "max": 1, "name": "score", "nameLocation": "middle", "nameGap": 26},
        "yAxis": {"type": "category", "data": names},
        "series": [
            {
                "type": "bar", "stack": "interval", "silent": True, "itemStyle": {"color": "transparent"},
                "data": [each.interval[0] for each in rows],
            },
            {
                "type": "bar", "stack": "interval", "barWidth": 14,
                "itemStyle": {"color": "#9cc3ea", "borderRadius": 7},
                "data": [each.interval[1] - each.interval[0] for each in rows],
            },
            {
                "type": "scatter", "symbolSize": 14, "itemStyle": {"color": COLOURS[0]},
                "data": [[each.mean, each.version] for each in rows if each.mean is not None],
            },
        ],
        "animation": False,
    }  # fmt: skip
