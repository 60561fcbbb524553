"""`/jobs`: trainings that the server runs by itself: their states, and what can be done with them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire_shell.components import (
    Column,
    Drawn,
    Table,
    button,
    empty,
    error,
    facts,
    panel,
    plain,
    sdk_line,
    state,
    title,
)
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import act, ago, ask, opened, span, told
from gradwire_console.pages.curves import Curves
from gradwire_console.pages.new_training import TrainingForm
from gradwire_console.workspace import EVENTS, FollowedJob, Workspace, Workspaces

COLUMNS = (
    Column("name", "Job", link=True),
    Column("state", "State", state=True),
    Column("recipe", "Recipe"),
    Column("steps", "Steps", num=True),
    Column("tokens", "Tokens", "Tokens of the batches that were trained on", num=True),
    Column("owner", "Owner", sparse=True),
    Column("age", "Age", num=True),
    Column("error", "Error", sparse=True),
)
EVENT_COLUMNS = (
    Column("time", "When"),
    Column("level", "Level", sparse=True),
    Column("message", "Event", wraps=True),
)
LOOK_S = 1.0
REMEDIES = {
    "invalid_training_file": "Mend the row in the file, upload it again, and start the training anew: nothing was"
    " trained yet. With on_error: skip rows that do not fit are left out.",
    "invalid_settings": "Start the training anew with other settings: nothing was trained yet.",
    "saved": "The checkpoints that it saved are kept: a new training can start from one (init from). What came before"
    " the failure is in the log below.",
    "": "No checkpoint was saved: mend what it names, and start the training anew. What came before the failure is in"
    " the log below.",
}
"""Advice after a failure, by the error's code, or by whether checkpoints are there."""


def register(workspaces: Workspaces) -> None:
    @page_at("/jobs", title="Jobs · gradwire")
    async def jobs() -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            await _list(workspaces, workspace)

        return await opened(workspaces, "/jobs", "/jobs", content)

    @page_at("/jobs/{job_id}", title="Job · gradwire")
    async def job(job_id: str) -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            try:
                asked = await workspace.job(job_id)
            except gradwire.GradwireError as failure:
                title("There is no such job" if isinstance(failure, gradwire.NotFoundError) else "Job")
                error(str(failure))
            else:
                await _Job(workspaces, workspace, asked).show()

        return await opened(workspaces, f"/jobs/{job_id}", "/jobs", content)


def _row(job: gradwire.Job) -> dict[str, Any]:
    return {
        "key": job.job_id,
        "href": f"jobs/{job.job_id}",
        "name": job.name or job.job_id,
        "state": job.state,
        "recipe": job.recipe,
        "steps": f"{job.step:,}" + (f" of {job.total_steps:,}" if job.total_steps else ""),
        "tokens": f"{job.trained_tokens:,}" if job.trained_tokens else "",
        "owner": job.owner,
        "age": ago(job.created_at),
        "error": job.error,
        "error_hint": job.error,
    }


async def _list(workspaces: Workspaces, workspace: Workspace) -> None:
    with ui.element("div").classes("gw-head"):
        title("Jobs")
        ui.element("div").classes("grow")
        if workspace.may_change():
            button("New training", lambda: open_form(), kind="primary")
    if workspace.may_change():
        with panel("New training") as panel_of_form:
            form = TrainingForm(workspaces, workspace)
            await form.show()
        panel_of_form.set_visibility(False)

    async def open_form() -> None:
        panel_of_form.set_visibility(not panel_of_form.visible)
        if panel_of_form.visible:
            await form.preview()

    failed = ui.element("div")
    none = ui.element("div")
    with none:
        empty(
            "No job yet. A job is a training that the server runs by itself, whatever becomes of your machine.",
            'job = await service.jobs.submit("sft", {"model": "MODEL", "data": "train.jsonl"})',
        )
    table = Table(COLUMNS, (), label="Jobs", search="Search jobs: name, state, recipe", unit="jobs", instead=none)

    async def look() -> None:
        with told(failed):
            found = await workspace.jobs()
            table.show([_row(job) for job in found])

    await look()
    ui.timer(LOOK_S, look)


class _Job:
    def __init__(self, workspaces: Workspaces, workspace: Workspace, found: FollowedJob) -> None:
        self._workspaces, self._workspace, self._job = workspaces, workspace, found.job

    async def show(self) -> None:
        with ui.element("div").classes("gw-head"):
            title(self._job.name or self._job.job_id)
            self._state = Drawn()
            self._to_run = ui.link("", "").classes("gw-link")
            ui.element("div").classes("grow")
            with ui.element("div").classes("gw-actions"):
                self._buttons = self._offered()
        self._failed = Drawn()
        files: dict[str, str] = {}
        with suppress(gradwire.GradwireError):
            files = {each.file_id: each.filename for each in await self._workspace.service.files.list()}
        self._bar = ui.linear_progress(0, show_value=False).props("aria-label=Progress")
        self._left = plain("", "quiet")
        with ui.element("div").classes("gw-split"):
            with ui.element("div"):
                self._curves = Curves(few=True)
                with panel("Events"):
                    self._events = Table(EVENT_COLUMNS, (), label="Events", none="None yet.")
                with ui.expansion("Log of the worker").classes("full-width gw-advanced"):
                    self._text = ui.label("").classes("gw-log").props("tabindex=0 role=region aria-label=Log")
            with ui.element("div"):
                with panel("Job"):
                    self._facts = Drawn()
                with panel("Settings"):
                    facts({key: files.get(str(value), str(value)) for key, value in self._job.settings.items()})
                sdk_line(f'job = await service.jobs.get("{self._job.job_id}")')
        await self._look()
        ui.timer(LOOK_S, self._look)

    def _draw(self) -> None:
        job = self._job
        self._bar.value = job.step / max(job.total_steps, 1)
        self._left.text = _progress(job)  # type: ignore[attr-defined]
        self._state.show(job.state, state)
        self._failed.show((job.error, job.error_code, bool(job.checkpoints)), _failure)
        if job.run_id and not self._to_run.text:
            self._to_run.text = "Its run"
            self._to_run.props["href"] = f"/run/{job.run_id}"
        for each, fits in self._buttons:
            each.set_visibility(fits(job))
        self._facts.show(
            {
                "Recipe": job.recipe, "Tokens": f"{job.trained_tokens:,}", "Workers so far": job.attempt,
                "Created": f"{ago(job.created_at)} ago", "Took": _took(job),
                "Checkpoints": len(job.checkpoints) or "", "Owner": job.owner,
            },
            facts,
        )  # fmt: skip

    def _offered(self) -> list[tuple[ui.button, Callable[[gradwire.Job], bool]]]:
        """The buttons, and when each fits: they stay while a job changes, so that no click is lost."""
        jobs = self._workspace.service.jobs
        if not self._workspace.may_change(self._job.owner):
            return []
        return [
            (self._action("Pause", jobs.pause, "pause"), lambda job: job.state in ("queued", "running")),
            (self._action("Resume", jobs.resume, "resume"), lambda job: job.state == "paused"),
            (self._action("Cancel", jobs.cancel, "cancel"), lambda job: not job.has_ended),
            (button("Delete", self._delete, kind="danger"), lambda job: job.has_ended),
        ]

    def _action(self, text: str, call: Callable[[str], Awaitable[object]], method: str) -> ui.button:
        async def do() -> None:
            await act(self._workspaces, lambda: call(self._job.job_id), "")
            await self._look()

        says = {"pause": "Its worker saves a checkpoint first.", "resume": "It goes on where it was.",
                "cancel": "Its run and its checkpoints stay."}  # fmt: skip
        code = f'await service.jobs.{method}("{self._job.job_id}")'
        return button(text, lambda: ask(f"{text} the job", says[method], code, f"{text} it", do))

    def _delete(self) -> None:
        job, jobs = self._job, self._workspace.service.jobs

        async def do() -> None:
            if await act(self._workspaces, lambda: jobs.delete(job.job_id), "Deleted."):
                ui.navigate.to("/jobs")

        ask(
            "Delete the job", "Its events and its log go with it. Its run and its checkpoints stay.",
            f'await service.jobs.delete("{job.job_id}")', "Delete", do, typed=job.name or job.job_id,
        )  # fmt: skip

    async def _look(self) -> None:
        try:
            job = await self._workspace.job(self._job.job_id)
        except gradwire.GradwireError:
            return  # the state of the connection is said above
        self._job = job.job
        self._draw()
        newest = list(job.events)[: -EVENTS - 1 : -1]
        reason = job.job.error  # which is said above
        shown = [each for each in newest if each.type == "message" and not (reason and reason in each.message)]
        self._events.show([_event(each) for each in shown])
        self._text.text = job.log
        if (live := self._workspace.runs.get(job.job.run_id)) is not None:
            with suppress(gradwire.GradwireError):
                self._curves.show({live.name: await self._workspace.record(job.job.run_id)})


def _event(event: gradwire.JobEvent) -> dict[str, Any]:
    return {
        "key": event.number,
        "time": f"{ago(event.created_at)} ago",
        "time_hint": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(event.created_at)),
        "level": "" if event.level == "info" else event.level,
        "message": event.message,
        "message_hint": event.message,
    }


def _failure(failed: tuple[str, str, bool]) -> None:
    """Why a job failed, once, and what to do."""
    reason, code, saved = failed
    if reason:
        with ui.element("div").classes("gw-error").props("role=alert"):
            plain(reason, "text", tag="div")
            plain(REMEDIES.get(code, REMEDIES["saved" if saved else ""]), "quiet", tag="div")


def _took(job: gradwire.Job) -> str:
    if not job.started_at:
        return ""
    return span((job.finished_at or time.time()) - job.started_at)


def _progress(job: gradwire.Job) -> str:
    """The steps that a job has taken, and the time that it still needs at its present pace."""
    if not job.total_steps:
        return ""
    done = f"{job.step:,} of {job.total_steps:,} steps"
    if job.state != "running" or not job.step or job.attempt > 1:
        return done
    return f"{done}, about {span((time.time() - job.started_at) / job.step * (job.total_steps - job.step))} left"
