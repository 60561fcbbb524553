"""`/jobs`: trainings that the server runs by itself: their states, a form for a new one, and what can be done."""

from __future__ import annotations

import dataclasses
import tempfile
import typing
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import gradwire
from fastapi.responses import RedirectResponse
from gradwire.jobs import SERVERS_OWN
from gradwire.recipes.command import RECIPES, settings_kind
from gradwire_shell.components import (
    Column,
    Table,
    button,
    empty,
    error,
    facts,
    panel,
    plain,
    sdk_line,
    skeleton,
    state,
    title,
)
from gradwire_shell.frame import page_at
from nicegui import events, ui

from gradwire_console.pages.common import FAILURES, act, ago, ask, opened, told
from gradwire_console.preview import SHOWN_CHARS, FirstRow, dry_run, first_rows
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
LOOK_S = 1.0
MAIN = ("data", "learning_rate", "batch_size", "epochs", "max_steps", "lora_rank")


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
                title("There is no such job")
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
            form = _Form(workspaces, workspace)
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


class _Form:
    """A form made from the dataclass of a recipe's settings."""

    def __init__(self, workspaces: Workspaces, workspace: Workspace) -> None:
        self._workspaces, self._workspace = workspaces, workspace
        self._fields: dict[str, tuple[Any, Any]] = {}
        self._models: list[str] = []
        self._files: dict[str, str] = {}
        self._previews = 0

    async def show(self) -> None:
        try:
            self._models = list(await self._workspace.models())
            await self._list_files()
        except gradwire.GradwireError as failure:
            error(str(failure))
            return
        with ui.element("div").classes("gw-head"):
            self._recipe = ui.select(list(RECIPES), value="sft", label="Recipe", on_change=self._build_anew).props(
                "outlined dense options-dense"
            ).style("min-width: 9rem")  # fmt: skip
            self._name = ui.input("Name").props("outlined dense")
            picker = ui.upload(on_upload=self._upload, auto_upload=True).props("accept=.jsonl,.json,.csv,.parquet")
            picker.style("display: none")  # the button opens it; an element without visibility takes no upload
            button("Upload data…", lambda: picker.run_method("pickFiles"))
        self._body = ui.element("div").classes("gw-grid")
        self._rows = ui.element("div").props('role=region aria-label="First rows"')
        self._build()
        with ui.element("div").classes("gw-actions"):
            button("Start the training", self._submit, kind="primary")
            self._try = button("Dry run", self._dry_run)
            plain("A dry run takes one step, and says what the training would take.", "quiet")
        self._estimate = ui.element("div")

    async def _list_files(self) -> None:
        files = [each for each in await self._workspace.service.files.list() if each.purpose == "fine-tune"]
        self._files = {each.file_id: f"{each.filename} ({each.num_lines:,} rows)" for each in files}

    async def _upload(self, event: events.UploadEventArguments) -> None:
        async def work() -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / (Path(event.file.name).name or "data.jsonl")
                await event.file.save(path)
                stored = await self._workspace.service.files.upload(path)
            await self._list_files()
            self._fields["data"][0].set_options(self._files, value=stored.file_id)
            if stored.num_problems:
                line, reason = next(iter(stored.problems.items()))
                raise ValueError(f"{stored.num_problems} rows cannot be used; line {line}: {reason}")

        cast(ui.upload, event.sender).reset()  # else it leaves out a file that is chosen again after a failure
        await act(self._workspaces, work, "The file is on the server.")

    async def _build_anew(self) -> None:
        self._build()
        await self.preview()

    def _build(self) -> None:
        kind = settings_kind(self._recipe.value)
        hints, defaults = typing.get_type_hints(kind), kind()
        self._fields = {}
        self._body.clear()
        own = [field for field in dataclasses.fields(kind) if field.name not in SERVERS_OWN]
        with self._body:
            for field in sorted(own, key=lambda field: field.name not in ("model", *MAIN)):
                default = getattr(defaults, field.name)
                if not isinstance(default, dict | list):
                    self._add(field.name, hints[field.name], default, field.metadata.get("help", ""))

    def _add(self, name: str, hint: Any, default: Any, help: str) -> None:
        label = name.replace("_", " ")
        made: Any
        if name == "model":
            made = ui.select(self._models, value=self._models[0] if self._models else None, label=label)
        elif name == "data":
            made = ui.select(self._files, value=next(iter(self._files), None), label=label)
        elif isinstance(default, bool):
            made = ui.checkbox(label, value=default)
        else:
            made = ui.input(label, value=str(default))
        made.props("outlined dense" + (" options-dense" if isinstance(made, ui.select) else "")).props["hint"] = help
        if isinstance(made, ui.select):
            made.props("hide-bottom-space")
        self._fields[name] = made, hint
        if name in ("model", "data", "train_on"):
            made.on_value_change(self.preview)

    async def preview(self) -> None:
        """Show the first rows of the data as they are learned, or why they cannot be."""
        self._previews += 1
        number = self._previews
        if not self._fields["data"][0].value or self._workspaces.read_only:
            return
        self._rows.clear()
        with self._rows:
            skeleton("4rem")
        rows: list[FirstRow] = []
        try:
            settings = self._given()
            rows, said = await first_rows(
                self._workspaces.server, self._workspace.service, self._recipe.value, settings
            )
        except FAILURES as failure:
            said = str(failure)
        if number != self._previews:
            return  # another choice was made meanwhile
        self._rows.clear()
        with self._rows:
            if rows:
                plain("The first rows as the model gets them; what is marked is learned.", "quiet")
            for row in rows:
                _show_row(row)
            if said:
                with ui.element("div").classes("gw-note").props("role=status"):
                    plain(said, "text")

    def _given(self) -> dict[str, Any]:
        defaults = settings_kind(self._recipe.value)()
        settings: dict[str, Any] = {}
        for name, (made, hint) in self._fields.items():
            value = made.value
            kind = typing.get_origin(hint) or hint
            if kind in (int, float) and not isinstance(value, bool):
                try:
                    value = kind(str(value).strip())
                except ValueError:
                    raise ValueError(f"{name} is {value!r}; it must be a number") from None
            if name in ("model", "data") or value != getattr(defaults, name):
                settings[name] = value
        data = str(settings.get("data") or "")
        for name in ("data", "validation"):
            if settings.get(name) and not str(settings[name]).startswith("file-"):
                raise ValueError(f"{name} is the id of a file on the server, such as file-…: upload one above")
        if not data:
            raise ValueError("choose the data: upload a file above, with a row a line")
        return settings

    async def _dry_run(self) -> None:
        said: list[str] = []

        async def work() -> None:
            said.append(
                await dry_run(self._workspaces.server, self._workspace.service, self._recipe.value, self._given())
            )

        self._estimate.clear()
        with self._estimate:
            skeleton("4rem")
        self._try.disable()
        try:
            await act(self._workspaces, work, "")
        finally:
            self._try.enable()
            self._estimate.clear()
        with self._estimate:
            for text in said:
                with ui.element("div").classes("gw-note").props("role=status"):
                    plain(text, "text")
                sdk_line(f"gradwire train {self._recipe.value} settings.yaml --dry-run")

    async def _submit(self) -> None:
        made: list[gradwire.Job] = []

        async def work() -> None:
            made.append(
                await self._workspace.service.jobs.submit(
                    self._recipe.value, self._given(), name=self._name.value or ""
                )
            )

        try:
            settings = self._given()
        except ValueError as failure:
            ui.notify(str(failure), type="negative")
            return

        async def start() -> None:
            if await act(self._workspaces, work, "The job is queued."):
                ui.navigate.to(f"/jobs/{made[0].job_id}")

        ask(
            "Start the training", f"The server runs {self._recipe.value} on {settings['model']} by itself.",
            f'job = await service.jobs.submit("{self._recipe.value}", {settings!r})', "Start", start,
        )  # fmt: skip


def _show_row(row: FirstRow) -> None:
    name = f"{row.name}: " if row.name else ""
    plain(f"{name}{row.num_tokens:,} tokens, {row.num_learned:,} learned", "quiet", tag="div")
    left = SHOWN_CHARS
    with ui.element("div").classes("gw-tokens").props("dir=auto tabindex=0"):
        for text, on in row.texts:
            shown, left = text[:left], max(0, left - len(text))
            if shown:
                plain(shown + ("…" if not left else ""), "", tag="mark" if on else "span")


class _Job:
    def __init__(self, workspaces: Workspaces, workspace: Workspace, found: FollowedJob) -> None:
        self._workspaces, self._workspace, self._job = workspaces, workspace, found.job
        self._last_event = 0

    async def show(self) -> None:
        with ui.element("div").classes("gw-head"):
            title(self._job.name or self._job.job_id)
            self._state = ui.element("div")
            ui.element("div").classes("grow")
            with ui.element("div").classes("gw-actions"):
                self._buttons = self._offered()
        self._bar = ui.linear_progress(0, show_value=False).props("aria-label=Progress")
        with ui.element("div").classes("gw-split"):
            with ui.element("div"):
                with panel("Events"):
                    self._events = ui.element("div").classes("gw-log").props("tabindex=0 role=region aria-label=Events")
                with panel("Log"):
                    self._text = ui.label("").classes("gw-log").props("tabindex=0 role=region aria-label=Log")
            with ui.element("div"):
                with panel("Job"):
                    self._facts = ui.element("div")
                with panel("Settings"):
                    facts({key: str(value) for key, value in self._job.settings.items()})
                sdk_line(f'job = await service.jobs.get("{self._job.job_id}")')
        self._draw()
        await self._look()
        ui.timer(LOOK_S, self._look)

    def _draw(self) -> None:
        job = self._job
        self._bar.value = job.step / max(job.total_steps, 1)
        for place in (self._state, self._facts):
            place.clear()
        with self._state:
            state(job.state, job.error)
        for each, fits in self._buttons:
            each.set_visibility(fits(job))
        with self._facts:
            facts(
                {
                    "Recipe": job.recipe, "Steps": f"{job.step:,} of {job.total_steps:,}" if job.total_steps else "",
                    "Tokens": f"{job.trained_tokens:,}", "Workers so far": job.attempt, "Run": job.run_id,
                    "Checkpoints": len(job.checkpoints) or "", "Owner": job.owner, "Error": job.error,
                }
            )  # fmt: skip

    def _offered(self) -> list[tuple[ui.button, Callable[[gradwire.Job], bool]]]:
        """The buttons, and when each fits: they stay while a job changes, so that no click is lost."""
        jobs = self._workspace.service.jobs
        curves = button("Curves", lambda: ui.navigate.to(f"/run/{self._job.run_id}"))
        offered: list[tuple[ui.button, Callable[[gradwire.Job], bool]]] = [(curves, lambda job: bool(job.run_id))]
        if not self._workspace.may_change(self._job.owner):
            return offered
        return [
            *offered,
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
        if job.job != self._job:
            self._job = job.job
            self._draw()
        with self._events:
            for event in [each for each in job.events if each.number > self._last_event]:
                self._last_event = event.number
                figures = " ".join(
                    f"{key} {value:.4g}" for key, value in event.data.items() if isinstance(value, float)
                )
                plain(f"{event.level}  {event.message}  {figures}".rstrip(), tag="div")
        for gone in list(self._events)[:-EVENTS]:
            gone.delete()
        self._text.text = job.log
