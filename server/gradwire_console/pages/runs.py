"""`/`: every run with its live state, its last figures and a small curve; searched, ordered and grouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import gradwire
import numpy as np
from fastapi.responses import RedirectResponse
from gradwire.charts import flat
from gradwire_shell.components import Column, Table, button, empty, keep_in_address, plain, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import ago, isolated, on_change, opened, short
from gradwire_console.series import Record, min_max
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

FIRST = (
    Column("name", "Run", link=True),
    Column("state", "State", "training: it has worked in the last seconds; parked: it cannot be restored", state=True),
    Column("step", "Step", "Optimizer steps taken", num=True),
)
LAST = (
    Column("pace", "Tokens/s", "Tokens that went through the model in the last 20 seconds, per second", num=True,
           sparse=True),
    Column("tokens", "Tokens", "Tokens that went through the model", num=True),
    Column("base", "Base model"),
    Column("trains", "Trains"),
    Column("owner", "Owner", "Name of the key that created the run", sparse=True),
    Column("active", "Active", "Since its last operation ended, or since it was created", num=True),
)  # fmt: skip
FIGURES = ("loss", "loss (forward only)", "reward_mean")
"""Metrics that are shown where none are chosen."""
CURVE_POINTS = 48
IDLE = "whether its program has ended or crashed is not known"
EXAMPLE = 'run = await service.create_run("MODEL", lora={"rank": 16}, name="first")'


def trains(run: LiveRun) -> str:
    """A label of the weights that a run trains: the adapter's rank or all weights, and the head."""
    lora = run.info.lora
    return (f"LoRA {lora['rank']}" if lora else "all weights") + (f", {run.info.head} head" if run.info.head else "")


GROUPS: dict[str, Callable[[LiveRun], str]] = {
    "base model": lambda run: run.info.base_model,
    "owner": lambda run: run.info.owner or "everyone",
    "state": lambda run: run.state,
}
"""Properties by which runs can be grouped, beside their tags."""


def polyline(record: Record, metric: str) -> str:
    """A metric over the steps as the points of an SVG polyline, 100 wide and 24 high; "" for fewer than two."""
    points = record.curve(metric)
    if len(points) < 2:
        return ""
    steps, values = np.array(points).T
    x, y = min_max(steps, values, CURVE_POINTS)
    level = flat([points], metric)
    low, high = (level.low, level.high) if level else (y.min(), y.max())
    across, up = 100 * (x - x[0]) / ((x[-1] - x[0]) or 1.0), 24 - 24 * (y - low) / (high - low)
    return " ".join(f"{left:.0f},{top:.1f}" for left, top in zip(across, up, strict=True))


@dataclass
class _Rows:
    """Rows of runs; what a record says is computed again when the record has grown."""

    metrics: tuple[str, ...]
    _known: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def of(self, run: LiveRun, record: Record | None, group: str | None) -> dict[str, Any]:
        info = run.info
        active = max(run.changed_at, record.operations[-1].time if record and record.operations else info.created_at)
        row = {
            "key": info.run_id,
            "href": f"run/{info.run_id}",
            "name": run.name,
            "name_sub": ", ".join(isolated(f"{key}={value}") for key, value in info.tags.items()),
            "name_hint": info.run_id,
            "state": run.state,
            "state_hint": info.parked or (IDLE if run.state == "idle" else ""),
            "step": f"{info.step:,}",
            "step_sort": info.step,
            "pace": short(run.tokens_per_s) if run.tokens_per_s else "",
            "pace_sort": run.tokens_per_s,
            "tokens": short(info.num_tokens) if info.num_tokens else "",
            "tokens_sort": info.num_tokens,
            "base": info.base_model,
            "trains": trains(run),
            "owner": info.owner,
            "active": f"{ago(active)} ago",
            "active_sort": active,
        }
        if group is not None:
            row["group"] = group
        return row | (self._measured(info.run_id, record) if record is not None else {})

    def _measured(self, run_id: str, record: Record) -> dict[str, Any]:
        known = self._known.get(run_id)
        if known is None or known[0] != len(record):
            last, cells = record.last, dict[str, Any]()
            for name in self.metrics:
                if name in last:
                    cells |= {f"m {name}": last[name].text(4), f"m {name}_sort": last[name].value}
            there = record.metrics_over("step")
            telling = sorted(self.metrics, key=lambda name: name != "reward_mean")  # a loss on rewards is about zero
            shown = next((name for name in telling if name in there), "")
            cells |= {"curve": polyline(record, shown), "curve_hint": shown} if shown else {}
            known = self._known[run_id] = len(record), cells
        return known[1]


def _columns(metrics: Sequence[str]) -> tuple[Column, ...]:
    figures = [Column(f"m {name}", name, f"The newest {name}", num=True, mean=True, sparse=True) for name in metrics]
    curve = Column(
        "curve",
        "Curve",
        "The mean reward, else the first of these figures that a run has, over its steps",
        curve=True,
        sparse=True,
    )
    return (*FIRST, *figures, curve, *LAST)


def register(workspaces: Workspaces) -> None:
    @page_at("/", title="Runs · gradwire")
    async def runs(group: str = "", figures: str = "") -> RedirectResponse | None:
        chosen = tuple(each for each in figures.split(",") if each) or FIGURES
        return await opened(workspaces, "/", "/", lambda workspace: _Runs(workspace, group, chosen).show())


class _Runs:
    def __init__(self, workspace: Workspace, group: str, metrics: tuple[str, ...]) -> None:
        self._workspace, self._group, self._rows = workspace, group, _Rows(metrics)
        self._chosen: list[str] = []

    async def show(self) -> None:
        with ui.element("div").classes("gw-head"):
            title("Runs")
            self._figures = plain("", "quiet")
            ui.element("div").classes("grow")
            self._metrics = ui.select(
                list(self._rows.metrics), value=list(self._rows.metrics), multiple=True, label="Figures",
                on_change=lambda event: self._show_metrics(tuple(event.value)),
            ).props("outlined dense options-dense").style("min-width: 9rem; max-width: 16rem")  # fmt: skip
            self._groups = ui.select(
                {"": "nothing"}, label="Group by", on_change=lambda event: self._group_by(event.value or "")
            ).props("outlined dense options-dense").style("min-width: 9rem")  # fmt: skip
            button("Compare selected", self._compare)
        none = ui.element("div")
        with none:
            empty("No run yet. A script creates one, and it appears here:", EXAMPLE)
        self._table = Table(
            _columns(self._rows.metrics), (), label="Runs", unit="runs", instead=none,
            search="Search runs: words, tags, state:idle, loss<2",
            on_chosen=lambda keys: self._chosen.__setitem__(slice(None), keys),
        )  # fmt: skip
        self._offer([])
        await self._refresh()
        on_change(self._workspace, self._refresh)

    def _offer(self, live: Sequence[LiveRun]) -> None:
        """Offer what there is to choose from."""
        known = {name for record in self._workspace.sketches().values() for name in record.metrics}
        there = dict.fromkeys([*self._rows.metrics, *sorted(known)])
        if list(there) != self._metrics.options:
            self._metrics.set_options(list(there), value=list(self._rows.metrics))
        tags = sorted({f"tag {key}" for run in live for key in run.info.tags} | ({self._group} - {"", *GROUPS}))
        groups = {"": "nothing"} | {each: each for each in (*GROUPS, *tags)}
        if groups != self._groups.options:
            self._groups.set_options(groups, value=self._group)

    def _show_metrics(self, metrics: tuple[str, ...]) -> None:
        if metrics != self._rows.metrics:
            self._rows = _Rows(metrics)
            keep_in_address(figures="" if metrics == FIGURES else ",".join(metrics))
            self._table.show_columns(_columns(metrics))
            self._show_rows()

    def _group_by(self, group: str) -> None:
        if group != self._group:
            self._group = group
            keep_in_address(group=group)
            self._show_rows()

    def _group_of(self, run: LiveRun) -> str | None:
        if not self._group:
            return None
        if self._group in GROUPS:
            return GROUPS[self._group](run)
        key = self._group.removeprefix("tag ")
        return f"{key} = {run.info.tags[key]}" if key in run.info.tags else f"without {key}"

    def _compare(self) -> None:
        if len(self._chosen) < 2:
            ui.notify("Select two runs or more: the boxes, or x on a row.")
        else:
            ui.navigate.to("/compare?runs=" + ",".join(self._chosen))

    async def _refresh(self) -> None:
        with suppress(gradwire.GradwireError):
            await self._workspace.jobs()
        live = self._workspace.newest_first()
        states = [run.state for run in live]
        words = [f"{states.count(word)} {word}" for word in ("training", "parked") if word in states]
        pace = sum(run.tokens_per_s for run in live)
        if pace:
            words.append(f"{short(pace)} tokens/s")
        self._figures.text = ", ".join(words)  # type: ignore[attr-defined]
        self._offer(live)
        self._show_rows()

    def _show_rows(self) -> None:
        live, sketches = self._workspace.newest_first(), self._workspace.sketches()
        self._table.show([self._rows.of(run, sketches.get(run.info.run_id), self._group_of(run)) for run in live])
