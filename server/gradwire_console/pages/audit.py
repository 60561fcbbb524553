"""`/audit`: who did what, as far as the server keeps it with what was made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Table, empty, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import isolated, on_change, opened, told
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

COLUMNS = (
    Column("when", "When", "By the clock of the console's machine; the year on hover"),
    Column("who", "Key", sparse=True),
    Column("what", "What"),
    Column("name", "Of", link=True),
    Column("detail", "Detail", sparse=True),
)
MOST_RUNS = 32
"""Runs whose checkpoints are looked at: those that have the newest."""


@dataclass(frozen=True)
class Event:
    """Something that was done, at a Unix time, by a key ("" on a server without keys)."""

    time: float
    who: str
    what: str
    name: str
    href: str = ""
    detail: str = ""


def register(workspaces: Workspaces) -> None:
    @page_at("/audit", title="Audit · gradwire")
    async def audit() -> RedirectResponse | None:
        return await opened(workspaces, "/audit", "/audit", _show)


async def _show(workspace: Workspace) -> None:
    with ui.element("div").classes("gw-head"):
        title("Audit")
        plain("what keys have made, newest first; what was deleted has left no trace here", "quiet")
    failed, none = ui.element("div"), ui.element("div")
    with none:
        empty("Nothing was done yet.")
    table = Table(COLUMNS, (), label="Audit", search="Search: key, action, run", unit="entries", instead=none)
    sdk_line("runs, jobs, keys = await service.list_runs(), await service.jobs.list(), await service.list_keys()")

    async def refresh() -> None:
        with told(failed):
            found = await events(workspace)
            table.show([_row(number, each) for number, each in zip(range(len(found), 0, -1), found)])

    await refresh()
    on_change(workspace, refresh)


async def events(workspace: Workspace) -> list[Event]:
    """Return the server's records of who did what, newest first.

    Raises:
        GradwireError: The server is away.
    """
    runs = workspace.newest_first()
    entries = [each for run in runs for each in _of_run(run)]
    saved = sorted((run for run in runs if run.info.latest_checkpoint), key=lambda run: -run.changed_at)[:MOST_RUNS]
    for run in saved:
        entries += _of_checkpoints(run, await workspace.checkpoints(run.info.run_id))
    for job in await workspace.jobs():
        entries += _of_job(job)
    for upload in await workspace.uploads():
        entries.append(
            Event(upload.created_at, upload.owner, "uploaded", upload.upload_id, "uploads", upload.base_model)
        )
    for key in await workspace.keys():
        entries.append(Event(key.created_at, key.name, "key made", key.name, "server", key.role))
        if key.revoked_at:
            entries.append(Event(key.revoked_at, key.name, "key revoked", key.name, "server"))
    return sorted(entries, key=lambda each: -each.time)


def _of_run(run: LiveRun) -> list[Event]:
    info, href = run.info, f"run/{run.info.run_id}"
    source = info.forked_from or info.from_upload
    what = "run forked" if info.forked_from else "run created"
    shared = f"shared with {', '.join(info.readers)}" if info.readers else ""
    return [Event(info.created_at, info.owner, what, run.name, href, ", ".join(filter(None, (source, shared))))]


def _of_checkpoints(run: LiveRun, checkpoints: Sequence[gradwire.Checkpoint]) -> list[Event]:
    href = f"run/{run.info.run_id}/checkpoints"
    return [
        Event(
            each.created_at,
            run.info.owner,
            "checkpoint saved",
            f"{isolated(run.name)}, {isolated(each.name)}",
            href,
            each.note,
        )
        for each in checkpoints
    ]


def _of_job(job: gradwire.Job) -> list[Event]:
    about = job.owner, job.name or job.job_id, f"jobs/{job.job_id}"
    entries = [Event(job.created_at, about[0], "job submitted", *about[1:], job.recipe)]
    if job.finished_at:
        entries.append(Event(job.finished_at, about[0], f"job {job.state}", *about[1:], job.error))
    return entries


def _row(number: int, each: Event) -> dict[str, Any]:
    row = {
        "key": str(number),
        "when": time.strftime("%m-%d %H:%M:%S", time.localtime(each.time)),
        "when_hint": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(each.time)),
        "who": each.who,
        "what": each.what,
        "name": each.name,
        "detail": each.detail,
    }
    return row | ({"href": each.href} if each.href else {})
