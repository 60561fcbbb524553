"""Plots of metrics, of one run or several, in groups, with axis, smoothing and zoom; some of them large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gradwire.charts import STYLE, chart, flat
from gradwire.recipes.report import unit_of
from gradwire_shell.components import Curve, Items, Lines, Plot, button, empty, keep_in_address, named, plain
from nicegui import ui

from gradwire_console.series import LARGE, Record

AT_FIRST, MOST_LARGE = 2, 4
"""Large plots until others are chosen, and at most."""
WORDS = {
    "Speed": ("num_", "tokens_per_s"),
    "Reward": ("reward", "success", "advantage", "zero_spread", "score", "margin", "preference", "value"),
    "Policy": ("kl", "entropy", "clip", "ratio", "sampler", "divergence", "log_prob", "stale", "version", "unmasked"),
    "Loss": ("",),
}
"""Group -> what the names of its metrics have; the first group that fits."""
GROUPS = ("Loss", "Reward", "Policy", "Speed")
OPEN_AT_FIRST = 8
"""Plots below the large ones up to which groups are open at first."""
AXES = {"step": "Steps", "tokens": "Tokens", "time": "Time"}
SMOOTHING = {1: "None", 10: "10 values", 50: "50 values", 250: "250 values"}


def group_of(name: str) -> str:
    """The group of a metric."""
    return next(group for group, words in WORDS.items() if any(word in name for word in words))


def grouped(metrics: set[str]) -> dict[str, list[str]]:
    """The metrics of each group that has some, those first that say most."""
    order = sorted(metrics, key=lambda name: (LARGE.index(name) if name in LARGE else len(LARGE), name))
    groups = {group: [name for name in order if group_of(name) == group] for group in GROUPS}
    return {group: names for group, names in groups.items() if names}


class Curves:
    """The metrics of records as plots, redrawn by :meth:`show`.

    Args:
        axis, mean, large: From the page's address: the axis, how many values are averaged, and the large metrics.
        few: Whether there are the large ones alone, and nothing to choose.
    """

    def __init__(self, axis: str = "", mean: int = 1, large: str = "", *, few: bool = False) -> None:
        self._records: dict[str, Record] = {}
        self._axis = axis if axis in AXES else "step"
        self._window = mean if mean in SMOOTHING else 1
        self._large: list[str] | None = large.split(",") if large else None
        self._drawn_large: list[str] = []
        self._unfolded: dict[str, bool] = {}
        self._within: tuple[float, float] | None = None
        self._few = few
        ui.add_head_html(f"<style>{STYLE}</style>")
        with ui.element("div").classes("gw-head") as head:
            ui.select(AXES, value=self._axis, label="Axis", on_change=lambda e: self._choose(axis=e.value)).props(
                "outlined dense options-dense"
            ).style("min-width: 8rem")
            ui.select(
                SMOOTHING, value=self._window, label="Mean over", on_change=lambda e: self._choose(window=e.value)
            ).props("outlined dense options-dense").style("min-width: 8rem")
            self._whole = button("Show all", lambda: self._zoom(None))
            self._legend = plain("", "quiet")
        self._whole.set_visibility(False)
        head.set_visibility(not few)
        self._none = ui.element("div")
        with self._none:
            empty("Nothing measured yet: the first forward_backward draws the first point.")
        self._of_large = Items("gw-grid large", "gw-panel gw-plotted")
        self._of_groups = Items("gw-stack", "gw-stack")
        self._of_groups.set_visibility(not few)

    def _choose(self, axis: str = "", window: int = 0) -> None:
        if axis:
            self._axis, self._within = axis, None
        self._window = window or self._window
        keep_in_address(
            axis="" if self._axis == "step" else self._axis, mean="" if self._window == 1 else str(self._window)
        )
        self.show(self._records)

    def _zoom(self, within: tuple[float, float] | None) -> None:
        self._within = within
        self._whole.set_visibility(within is not None)
        self.show(self._records)

    def _range(self, ends: tuple[float, float] | None) -> None:
        scale = 1000.0 if self._axis == "time" else 1.0
        self._zoom(ends and (ends[0] / scale, ends[1] / scale))

    def _resize(self, name: str) -> None:
        """Show a small plot large, or a large one small."""
        large = self._shown_large(self._there())
        others = [each for each in large if each != name]
        self._large = others if name in large else [*others, name][-MOST_LARGE:]
        keep_in_address(large=",".join(self._large))
        self.show(self._records)

    def _there(self) -> set[str]:
        return {name for record in self._records.values() for name in record.metrics_over(self._axis)}

    def _shown_large(self, there: set[str]) -> list[str]:
        if self._large is None:
            return [name for name in LARGE if name in there][:AT_FIRST]
        return [name for name in self._large if name in there]

    def show(self, records: Mapping[str, Record]) -> None:
        """Draw the metrics of records, by the name of their run."""
        self._records = dict(records)
        there = self._there()
        large = self._drawn_large = self._shown_large(there)
        self._none.set_visibility(not there)
        pale = "Pale: each value. " if self._window > 1 else ""
        self._legend.text = f"{pale}Drag in a plot to zoom." if there else ""  # type: ignore[attr-defined]
        self._of_large.show({name: name for name in large}, self._draw)
        groups, drawn = {} if self._few else grouped(there - {*large}), 0
        for group, names in groups.items():
            drawn += len(names)
            self._unfolded.setdefault(group, drawn <= OPEN_AT_FIRST)
        self._of_groups.show(groups, self._group)

    def _as_html(self, name: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
        """The curves over steps; over another axis they wait for their library."""
        named = {"" if len(curves) == 1 else each: points for each, points in curves.items()}
        return chart(name, named) if self._axis == "step" else ""

    def _group(self, names: list[str]) -> Callable[[list[str]], None]:
        group = group_of(names[0])

        def fold() -> None:
            self._unfolded[group] = not self._unfolded[group]
            self.show(self._records)

        head = button("", fold, kind="fold")
        items = Items("gw-grid small", "gw-panel gw-plotted")

        def show(names: list[str]) -> None:
            unfolded = self._unfolded[group]
            head.text = f"{'▾' if unfolded else '▸'} {group} · {len(names)}"
            head.props["aria-expanded"] = "true" if unfolded else "false"
            items.set_visibility(unfolded)
            items.show({name: name for name in names} if unfolded else {}, self._draw)

        return show

    def _draw(self, name: str) -> Callable[[str], None]:
        is_large = name in self._drawn_large
        with ui.element("div").classes("gw-head"):
            with ui.element("div").classes("grow"):
                plain(name, "gw-plot-title")
                if is_large and (unit := unit_of(name)):
                    plain(f" {unit}", "quiet")
            value = plain("", "mono")
            icon = "close_fullscreen" if is_large else "open_in_full"
            resize = button("", lambda: self._resize(name), kind="icon", icon=icon).props("dense size=sm")
            named(resize, f"Show {name} {'small' if is_large else 'large'}").set_visibility(not self._few)
        plot = Plot([], title=name, on_range=self._range, as_html=partial(self._as_html, name))
        reason = Lines(classes="quiet")

        def show(name: str) -> None:
            curves = self._of(name)
            level = flat([curve.points for curve in curves], name)
            plot.show(curves, axis=self._axis, level=(level.low, level.high) if level else None)
            reason.show([level.reason] if level is not None and level.reason else [])
            last = [record.last[name] for record in self._records.values() if name in record.last]
            value.text = last[0].text(5) if len(last) == 1 else ""  # type: ignore[attr-defined]

        return show

    def _of(self, name: str) -> list[Curve]:
        curves = []
        for colour, (label, record) in enumerate(self._records.items()):
            if self._window > 1:
                curves.append(Curve(label, record.curve(name, self._axis, 1, self._within), colour, faint=True))
            curves.append(Curve(label, record.curve(name, self._axis, self._window, self._within), colour))
        return [curve for curve in curves if len(curve.points)]
