"""`/timeline`: what the engines computed for whom, and who waited; as a trace for Perfetto too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import button, empty, panel, plain, sdk_line, title
from gradwire_shell.detail import Lanes
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import opened, told
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

MOST_RUNS = 12
LOOK_S = 2.0
MOST_CALLS = 2
"""Calls of the server a second, for all pages together, while every run works."""
KINDS = {"sample": "sampling", "save_checkpoint": "files", "export": "files", "load_checkpoint": "files"}
COLOURS = {"wait": "--wait", "compute": "--s1", "sampling": "--s2", "files": "--s4", "failed": "--bad"}
MEANINGS = {"wait": "waiting", "compute": "computing", "sampling": "sampling", "files": "checkpoints and exports",
            "failed": "failed"}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A piece of a run's time; ``begin`` and ``end`` in Unix seconds, ``kind`` one of ``COLOURS``."""

    run_id: str
    name: str
    engine: int
    begin: float
    end: float
    kind: str
    seq: int


def register(workspaces: Workspaces) -> None:
    @page_at("/timeline", title="Timeline · gradwire")
    async def timeline() -> RedirectResponse | None:
        return await opened(workspaces, "/timeline", "/timeline", _show)


async def _show(workspace: Workspace) -> None:
    with ui.element("div").classes("gw-head"):
        title("Timeline")
        plain(f"the newest {MOST_RUNS} runs, their newest operations", "quiet")
        ui.element("div").classes("grow")
        button("Download a trace", lambda: ui.navigate.to("/api/trace"))
    failed, none = ui.element("div"), ui.element("div")
    with none:
        empty("Nothing was computed since the server started.")
    with panel() as shown:
        with ui.element("div").classes("gw-legend"):
            for kind, meaning in MEANINGS.items():
                with ui.element("span").classes("gw-key").style(f"--c: var({COLOURS[kind]})"):
                    plain(meaning)
            plain("Drag to zoom; a double click shows all.", "quiet")
        lanes = Lanes("Work of each run over time", COLOURS)
    sdk_line('activity = await service.get_training_client("RUN_ID").activity()')

    async def look() -> None:
        with told(failed):
            timed = await spans(workspace)
            none.set_visibility(not timed)
            shown.set_visibility(bool(timed))
            order = list(dict.fromkeys(each.run_id for each in timed))
            names = [_name(workspace, run_id) for run_id in order]
            lanes.show(names, [_box(order.index(each.run_id), each) for each in timed])

    await look()
    ui.timer(LOOK_S, look)


def _name(workspace: Workspace, run_id: str) -> str:
    live = workspace.runs.get(run_id)
    return live.name if live is not None else run_id


def _box(lane: int, span: Span) -> list[Any]:
    hint = f"{span.name} {span.seq}: {MEANINGS[span.kind]} {span.end - span.begin:.3f} s, engine {span.engine}"
    return [lane, span.begin * 1000, span.end * 1000, span.kind, hint]


async def spans(workspace: Workspace) -> list[Span]:
    """The time of the newest operations of the runs that worked last, waits before the work that they precede."""
    timed: list[Span] = []
    runs = _newest(workspace)
    for run in runs:
        activity = await workspace.activity(run.info.run_id, every_s=max(LOOK_S, len(runs) / MOST_CALLS))
        for each in reversed(activity.operations):
            begun = each.accepted_at + each.queue_s
            about = run.info.run_id, each.operation, run.info.engine
            timed.append(Span(*about, each.accepted_at, begun, "wait", each.seq))
            if each.engine_s:
                kind = "failed" if each.state == "failed" else KINDS.get(each.operation, "compute")
                timed.append(Span(*about, begun, begun + each.engine_s, kind, each.seq))
    return sorted(timed, key=lambda each: each.kind != "wait")


def _newest(workspace: Workspace) -> list[LiveRun]:
    active = [run for run in workspace.runs.values() if run.info.accepted_seq]
    active.sort(key=lambda run: (run.state == "training", run.changed_at, run.info.created_at), reverse=True)
    return active[:MOST_RUNS]


def trace(workspace: Workspace, spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as a Chrome trace, which Perfetto opens: a process an engine, a thread a run."""
    order = {run_id: number for number, run_id in enumerate(dict.fromkeys(each.run_id for each in spans))}
    events: list[dict[str, Any]] = []
    for each in {each.engine: each for each in spans}.values():
        events.append(
            {"ph": "M", "name": "process_name", "pid": each.engine, "args": {"name": f"engine {each.engine}"}}
        )
    for each in {(each.engine, each.run_id): each for each in spans}.values():
        name = {"name": _name(workspace, each.run_id)}
        events.append({"ph": "M", "name": "thread_name", "pid": each.engine, "tid": order[each.run_id], "args": name})
    for each in spans:
        begin, duration = each.begin * 1e6, (each.end - each.begin) * 1e6
        event = {"name": each.name, "cat": each.kind, "pid": each.engine, "args": {"run": each.run_id, "seq": each.seq}}
        if each.kind == "wait":  # waits of a run overlap, which slices of a thread may not
            about = {"id": f"{each.run_id}/{each.seq}", "name": f"{each.name} waits"}
            events.append(event | about | {"ph": "b", "ts": begin})
            events.append(event | about | {"ph": "e", "ts": begin + duration})
        else:
            events.append(event | {"ph": "X", "ts": begin, "dur": duration, "tid": order[each.run_id]})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
