"""Panels of curves: one a metric, of one run or several, with axis, smoothing and zoom."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwire_shell.components import Curve, Items, Lines, Plot, button, empty, plain
from nicegui import ui

from gradwire_console.series import Record, flat

FIRST = ("loss", "loss (forward only)", "reward_mean", "preference_accuracy", "token_accuracy", "grad_norm",
         "learning_rate", "approx_kl", "entropy", "clip_fraction")  # fmt: skip
LAST = ("num_tokens", "num_sequences")
AXES = {"step": "Steps", "tokens": "Tokens", "time": "Time"}
SMOOTHING = {1: "None", 10: "10 values", 50: "50 values", 250: "250 values"}
SHOWN_AT_FIRST = 9


class Curves:
    """The metrics of records as panels, redrawn by :meth:`show`."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._axis, self._window, self._all = "step", 1, False
        self._within: tuple[float, float] | None = None
        with ui.element("div").classes("gw-head"):
            ui.select(AXES, value="step", label="Axis", on_change=lambda e: self._choose(axis=e.value)).props(
                "outlined dense options-dense"
            ).style("min-width: 8rem")
            ui.select(SMOOTHING, value=1, label="Mean over", on_change=lambda e: self._choose(window=e.value)).props(
                "outlined dense options-dense"
            ).style("min-width: 8rem")
            self._whole = button("Show all", lambda: self._zoom(None))
            self._more = button("All metrics", self._toggle)
            plain("Drag in a plot to zoom.", "quiet")
        self._whole.set_visibility(False)
        self._none = ui.element("div")
        with self._none:
            empty("Nothing measured yet: the first forward_backward draws the first point.")
        self._grid = Items("gw-grid", "gw-panel")

    def _choose(self, axis: str = "", window: int = 0) -> None:
        if axis:
            self._axis, self._within = axis, None
        self._window = window or self._window
        self.show(self._records)

    def _toggle(self) -> None:
        self._all = not self._all
        self._more.text = "Main metrics" if self._all else "All metrics"
        self.show(self._records)

    def _zoom(self, within: tuple[float, float] | None) -> None:
        self._within = within
        self._whole.set_visibility(within is not None)
        self.show(self._records)

    def _range(self, ends: tuple[float, float] | None) -> None:
        scale = 1000.0 if self._axis == "time" else 1.0
        self._zoom(ends and (ends[0] / scale, ends[1] / scale))

    def _names(self) -> list[str]:
        there = dict.fromkeys(name for record in self._records.values() for name in record.metrics)
        ordered = [name for name in FIRST if name in there] + sorted(
            (name for name in there if name not in FIRST), key=lambda name: (name in LAST, name)
        )
        self._more.set_visibility(len(ordered) > SHOWN_AT_FIRST)
        return ordered if self._all else ordered[:SHOWN_AT_FIRST]

    def show(self, records: Mapping[str, Record]) -> None:
        """Draw the metrics of records, by the name of their run."""
        self._records = dict(records)
        names = self._names()
        self._none.set_visibility(not names)
        self._grid.show(dict(zip(names, names, strict=True)), self._draw)

    def _draw(self, name: str) -> Callable[[str], None]:
        with ui.element("div").classes("gw-head"):
            plain(name, "gw-plot-title grow")
            value = plain("", "mono")
        plot = Plot([], title=name, on_range=self._range)
        reason = Lines(classes="quiet")

        def show(name: str) -> None:
            curves = self._of(name)
            level = flat([curve.points for curve in curves])
            plot.show(curves, time=self._axis == "time", level=(level.low, level.high) if level else None)
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
