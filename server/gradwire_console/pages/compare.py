"""`/compare?runs=A,B`: curves of several runs over each other, their last figures, and where their settings differ."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire import RunInfo
from gradwire_shell.components import Column, Drawn, Table, button, empty, error, panel, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import isolated, on_change, opened, short
from gradwire_console.pages.curves import Curves
from gradwire_console.report import page
from gradwire_console.series import Record
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

MOST = 8
SETTINGS = ("base_model", "lora", "head", "seed", "dropout", "kind", "forked_from", "num_trainable_parameters")


def register(workspaces: Workspaces) -> None:
    @page_at("/compare", title="Compare · gradwire")
    async def compare(runs: str = "", axis: str = "", mean: int = 1, large: str = "") -> RedirectResponse | None:
        curves = {"axis": axis, "mean": mean, "large": large}

        async def content(workspace: Workspace) -> None:
            title("Compare")
            asked = list(dict.fromkeys(each for each in runs.split(",") if each))[:MOST]
            _choice(workspace, asked)
            readable = [run_id for run_id in asked if run_id in workspace.runs]
            if len(readable) < len(asked):
                error(f"{len(asked) - len(readable)} of these runs were deleted, or this key may not read them.")
            if readable:
                await _show(workspace, readable, curves)
            else:
                empty("Choose the runs to lay over each other, above or by their boxes in the list of runs.")

        return await opened(workspaces, f"/compare?runs={runs}", "/compare", content)


def _choice(workspace: Workspace, asked: list[str]) -> None:
    names = {run.info.run_id: run.name for run in workspace.newest_first()}
    ui.select(
        names, value=[each for each in asked if each in names], multiple=True, label=f"Runs, {MOST} at most",
        on_change=lambda event: ui.navigate.to("/compare?runs=" + ",".join(event.value[:MOST])),
    ).props("outlined dense use-chips options-dense").classes("full-width")  # fmt: skip


def labels(runs: Sequence[LiveRun]) -> dict[str, str]:
    """A label for each run: its name, with its id where that is taken."""
    names = [isolated(run.job_name or run.info.name) for run in runs]
    return {
        run.info.run_id: name if name and names.count(name) == 1 else f"{name} {run.info.run_id}".strip()
        for run, name in zip(runs, names, strict=True)
    }


async def _show(workspace: Workspace, run_ids: list[str], how: Mapping[str, Any]) -> None:
    shown = labels([workspace.runs[run_id] for run_id in run_ids])
    with ui.element("div").classes("gw-legend gw-stays"):
        for colour, (run_id, label) in enumerate(shown.items()):
            with ui.element("span").classes("gw-key").style(f"--c: var(--s{colour % 8 + 1})"):
                ui.link(label, f"/run/{run_id}").classes("gw-link").props["title"] = label
        ui.element("div").classes("grow")
        button("Download a report", lambda: ui.navigate.to("/api/report?runs=" + ",".join(run_ids)))
    place = ui.element("div")
    curves = Curves(**how)
    with panel("Last figures"):
        figures = Drawn()
    with panel("Settings that differ"):
        _differences([workspace.runs[run_id].info for run_id in run_ids], shown)
    sdk_line("histories = [await service.get_training_client(run_id).history() for run_id in " + repr(run_ids) + "]")

    async def refresh() -> None:
        records: dict[str, Record] = {}
        place.clear()
        try:
            for run_id, label in shown.items():
                if run_id in workspace.runs:
                    records[label] = await workspace.record(run_id)
        except gradwire.GradwireError as failure:
            with place:
                error(str(failure))
            return
        curves.show(records)
        lasts = {label: record.last for label, record in records.items()}
        texts = {label: {name: each.text(5) for name, each in last.items()} for label, last in lasts.items()}
        figures.show(texts, _figures)

    await refresh()
    on_change(workspace, refresh)


def _figures(records: dict[str, dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for record in records.values() for name in record))
    columns = [Column("metric", "Metric"), *(Column(f"r{n}", label, num=True) for n, label in enumerate(records))]
    rows: list[dict[str, Any]] = []
    for name in names:
        values = {f"r{n}": record.get(name, "") for n, record in enumerate(records.values())}
        rows.append({"key": name, "metric": name} | values)
    Table(columns, rows, label="Last figures", none="Nothing measured yet.")


def differences(infos: list[RunInfo]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs: their name, and a value a run."""
    tags = sorted({key for info in infos for key in info.tags})
    named = [(name, [getattr(info, name) for info in infos]) for name in SETTINGS]
    named += [(f"tag {key}", [info.tags.get(key, "") for info in infos]) for key in tags]
    return [(name, list(map(_text, values))) for name, values in named if any(value != values[0] for value in values)]


async def report(workspace: Workspace, run_ids: list[str]) -> str:
    """The comparison as one HTML file."""
    runs = [workspace.runs[run_id] for run_id in run_ids]
    infos = [run.info for run in runs]
    records = {label: await workspace.whole_record(run_id) for run_id, label in labels(runs).items()}
    return await asyncio.to_thread(page, records, infos, differences(infos))


def _differences(infos: list[RunInfo], shown: dict[str, str]) -> None:
    rows: list[dict[str, Any]] = [
        {"key": name, "setting": name} | {f"r{n}": value for n, value in enumerate(values)}
        for name, values in differences(infos)
    ]
    if not rows:
        plain("None: they have the same settings.", "quiet")
        return
    columns = [Column("setting", "Setting"), *(Column(f"r{n}", shown[each.run_id]) for n, each in enumerate(infos))]
    Table(columns, rows, label="Settings that differ")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return short(value) if isinstance(value, int) and value > 9999 else "" if value is None else str(value)
