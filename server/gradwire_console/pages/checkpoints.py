"""`/run/{run_id}/checkpoints`: a run's checkpoints, with what was measured with each, and their lineage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Items, Table, button, panel, plain, sdk_line
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages import checkpoint_actions as actions
from gradwire_console.pages.common import ago, isolated, on_change, opened_run, run_head, size_of, told
from gradwire_console.series import Record
from gradwire_console.workspace import Workspace, Workspaces

MEASURED = {
    "loss": "Loss",
    "loss (forward only)": "Held-out loss",
    "reward_mean": "Reward",
    "preference_accuracy": "Accuracy",
}
"""Metrics that are shown beside a checkpoint."""
COLUMNS = (
    Column("name", "Checkpoint", "Opens it in the playground", link=True),
    Column("step", "Step", "Optimizer steps before it", num=True),
    *(
        Column(name, label, f'The {name} with its weights; "at step": with earlier ones', num=True, sparse=True)
        for name, label in MEASURED.items()
    ),
    Column("rated", "Rated", "What people said of its answers: mean score, comparisons won", sparse=True),
    Column("forks", "Forks", "Runs that began with its weights", sparse=True),
    Column("size", "Size", "With the state of the optimizer", num=True),
    Column("age", "Age", num=True),
    Column("note", "Note", sparse=True),
)
MOST_TRIED = 5
MOST_ANCESTORS = 16


def register(workspaces: Workspaces) -> None:
    @page_at("/run/{run_id}/checkpoints", title="Checkpoints · gradwire")
    async def checkpoints(run_id: str) -> RedirectResponse | None:
        return await opened_run(
            workspaces, run_id, "/checkpoints", lambda workspace: _Checkpoints(workspaces, workspace, run_id).show()
        )


def measured(record: Record, checkpoint: gradwire.Checkpoint) -> dict[str, str]:
    """The newest value of each metric for a checkpoint's weights; one of earlier weights is given with its step."""
    figures = {name: record.at_checkpoint(name, checkpoint) for name in MEASURED}
    return {name: figure.text(4) for name, figure in figures.items() if figure is not None}


class _Checkpoints:
    def __init__(self, workspaces: Workspaces, workspace: Workspace, run_id: str) -> None:
        self._workspaces, self._workspace, self._run_id = workspaces, workspace, run_id
        self._found: dict[str, gradwire.Checkpoint] = {}
        self._chosen: list[str] = []

    async def show(self) -> None:
        run_head(self._workspace, self._run_id, "/checkpoints")
        self._failed = ui.element("div")
        with ui.element("div").classes("gw-split"):
            with ui.element("div"):
                with ui.element("div").classes("gw-actions"):
                    if self._workspace.may_sample:
                        button("Try selected", self._try)
                    if self._workspace.may_change():
                        self._button("Fork", actions.fork)
                        self._button("Export", actions.export)
                    if self._workspace.may_change(self._workspace.runs[self._run_id].info.owner):
                        self._button("Delete", actions.delete, kind="danger")
                        button("Save checkpoint", self._save)
                self._table = Table(
                    COLUMNS, (), label="Checkpoints", search="Search checkpoints: name, note, fork", unit="checkpoints",
                    none="None yet.", on_chosen=lambda keys: self._chosen.__setitem__(slice(None), keys),
                )  # fmt: skip
            with ui.element("div"):
                with panel("Where it comes from"):
                    self._ancestors = Items()
                with panel("In Python"):
                    sdk_line(f'await service.get_training_client("{self._run_id}").list_checkpoints()')
        await self._refresh()
        on_change(self._workspace, self._refresh)

    def _button(
        self, text: str, do: Callable[[Workspaces, Workspace, gradwire.Checkpoint], None], kind: str = "plain"
    ) -> None:
        def ask() -> None:
            chosen = self._selected()
            if len(chosen) == 1:
                do(self._workspaces, self._workspace, chosen[0])
            else:
                ui.notify("Select one checkpoint: its box, or x on its row.")

        button(text, ask, kind=kind)

    def _selected(self) -> list[gradwire.Checkpoint]:
        return [self._found[name] for name in self._chosen if name in self._found]

    def _try(self) -> None:
        if chosen := self._selected()[:MOST_TRIED]:
            actions.try_out(chosen)
        else:
            ui.notify("Select one checkpoint or more: the boxes, or x on a row.")

    def _save(self) -> None:
        if (live := self._workspace.runs.get(self._run_id)) is not None:
            actions.save(self._workspaces, self._workspace, live)

    async def _refresh(self) -> None:
        with told(self._failed):
            checkpoints = await self._workspace.checkpoints(self._run_id)
            record = await self._workspace.record(self._run_id)
            self._found = {each.name: each for each in checkpoints}
            forks, rated = forks_of(self._workspace), await self._rated()
            rows = [_row(each, record, forks[each.path], rated[each.path]) for each in reversed(checkpoints)]
            asks = self._workspace.may_sample
            self._table.show([row if asks else row | {"href": ""} for row in rows])
            self._show_ancestors()

    def _show_ancestors(self) -> None:
        """Show the checkpoints that the run goes back to, as links, and what the oldest of their runs began with."""
        runs, paths = self._workspace.runs, ancestors(self._workspace, self._run_id)
        origins = {path: _origin(self._workspace, path) for path in paths}
        oldest = [self._run_id, *(path.partition("/")[0] for path in paths)][-1]
        if oldest in runs:
            info = runs[oldest].info
            begun = f"the upload {info.from_upload}" if info.from_upload else f"the base model {info.base_model}"
            origins[""] = begun, ""

        def draw(origin: tuple[str, str]) -> Callable[[tuple[str, str]], object]:
            words, href = origin
            link = ui.link(words, href).classes("gw-link") if href else plain(words)
            return lambda now: link.set_text(now[0])  # type: ignore[attr-defined]

        self._ancestors.show(origins, draw)

    async def _rated(self) -> defaultdict[str, list[str]]:
        """Path of a checkpoint -> what people said of it, for each agent."""
        rated: defaultdict[str, list[str]] = defaultdict(list)
        if self._workspaces.feedback is not None:
            with suppress(OSError):  # which the page of ratings shows
                for each in await self._workspaces.feedback.ratings():
                    rated[each.source].append(each.words)
        return rated


def forks_of(workspace: Workspace) -> defaultdict[str, list[str]]:
    """Path of a checkpoint -> names of the runs that were forked from it."""
    forks: defaultdict[str, list[str]] = defaultdict(list)
    for run in workspace.newest_first():
        if run.info.forked_from:
            forks[run.info.forked_from].append(run.name)
    return forks


def ancestors(workspace: Workspace, run_id: str) -> list[str]:
    """Paths of the checkpoints that a run goes back to, the nearest first."""
    paths: list[str] = []
    while run_id in workspace.runs and len(paths) < MOST_ANCESTORS:
        path = workspace.runs[run_id].info.forked_from
        if not path:
            break
        paths.append(path)
        run_id = path.partition("/")[0]
    return paths


def _origin(workspace: Workspace, path: str) -> tuple[str, str]:
    """The label of the checkpoint from which a run began, and the path of its page; "" where there is none."""
    parent, _, name = path.partition("/")
    live = workspace.runs.get(parent)
    if live is None:
        return f"{name} of {parent}, a run that was deleted or is another key's", ""
    return f"{isolated(name)} of {isolated(live.name)}", f"/run/{parent}/checkpoints"


def _row(each: gradwire.Checkpoint, record: Record, forks: list[str], rated: list[str]) -> dict[str, Any]:
    return {
        "key": each.name,
        "href": f"../../playground?models={each.path}",
        "name": each.name,
        "name_hint": each.path,
        "step": f"{each.step:,}",
        "size": size_of(each.size_bytes),
        "age": ago(each.created_at),
        "note": each.note,
        "forks": ", ".join(map(isolated, forks)),
        "rated": "; ".join(rated),
        **measured(record, each),
    }
