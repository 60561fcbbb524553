"""The form that starts a training: four fields, the first rows as they are learned, a dry run, and all settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import gradwire
from gradwire.recipes.command import RECIPES
from gradwire_shell.components import button, error, named, plain, sdk_line, skeleton, title
from nicegui import events, ui

from gradwire_console.pages.common import FAILURES, act, ask, counted, isolated
from gradwire_console.preview import SHOWN_CHARS, FirstRow, dry_run, first_rows
from gradwire_console.recipe_fields import (
    EXAMPLES,
    GRADERS,
    GROUPS,
    Field,
    fields_of,
    resolved,
    rewards,
    settings_given,
    summary,
)
from gradwire_console.workspace import Workspace, Workspaces

LOOKS = "outlined dense options-dense hide-bottom-space"


class TrainingForm:
    """A form made from the settings of a recipe."""

    def __init__(self, workspaces: Workspaces, workspace: Workspace) -> None:
        self._workspaces, self._workspace = workspaces, workspace
        self._fields: dict[str, tuple[Field, Any]] = {}
        self._models: dict[str, gradwire.ModelInfo] = {}
        self._files: dict[str, gradwire.FileInfo] = {}
        self._losses: dict[str, gradwire.LossInfo] = {}
        self._previews = 0

    async def show(self) -> None:
        try:
            self._models = await self._workspace.models()
            self._losses = {each.name: each for each in await self._workspace.service.list_losses()}
            await self._list_files()
        except gradwire.GradwireError as failure:
            error(str(failure))
            return
        with ui.element("div").classes("gw-grid four"):
            self._model = ui.select(list(self._models), value=next(iter(self._models), None), label="Model")
            with ui.element("div").classes("gw-beside"):
                self._data = ui.select(self._named_files(), value=next(iter(self._files), None), label="Data")
                picker = ui.upload(on_upload=self._upload, auto_upload=True).props("accept=.jsonl,.json,.csv,.parquet")
                picker.style("display: none")  # the button opens it; an element without visibility takes no upload
                upload = button("", lambda: picker.run_method("pickFiles"), kind="icon", icon="upload_file")
                named(upload, "Upload data…").props["title"] = "Upload a file of rows: .jsonl, .json, .csv or .parquet"
            self._recipe = ui.select(list(RECIPES), value="sft", label="Recipe", on_change=self._build_anew)
            self._name = ui.input("Name").props("outlined dense")
        for each in (self._model, self._data, self._recipe):
            each.props(LOOKS)
        self._model.on_value_change(self.preview)
        self._data.on_value_change(self.preview)
        with ui.element("div").classes("gw-split even"):
            self._rows = ui.element("div").props('role=region aria-label="First rows"')
            with ui.element("div"):
                self._summary = plain("", "text")
                with ui.element("div").classes("gw-actions"):
                    button("Start the training", self._submit, kind="primary")
                    self._try = button("Dry run", self._dry_run)
                plain("A dry run takes two steps, and says what the training would take.", "quiet")
                self._estimate = ui.element("div")
        with ui.expansion("Advanced").classes("full-width gw-advanced"):
            plain("What is left empty is as it says in grey.", "quiet")
            self._body = ui.element("div").classes("gw-stack")
        self._build()

    async def _list_files(self) -> None:
        files = await self._workspace.service.files.list()
        self._files = {each.file_id: each for each in files if each.purpose == "fine-tune"}

    def _named_files(self) -> dict[str, str]:
        return {
            name: f"{isolated(each.filename)} ({counted(each.num_lines, 'row')})" for name, each in self._files.items()
        }

    async def _upload(self, event: events.UploadEventArguments) -> None:
        async def work() -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / (Path(event.file.name).name or "data.jsonl")
                await event.file.save(path)
                stored = await self._workspace.service.files.upload(path)
            await self._list_files()
            self._data.set_options(self._named_files(), value=stored.file_id)
            if stored.num_problems:
                raise ValueError(f"{stored.filename}: {stored.problems_text}")

        cast(ui.upload, event.sender).reset()  # else it leaves out a file that is chosen again after a failure
        await act(self._workspaces, work, "The file is on the server.")

    async def _build_anew(self) -> None:
        self._build()
        await self.preview()

    def _build(self) -> None:
        self._fields = {}
        self._body.clear()
        fields = fields_of(self._recipe.value, self._losses)
        with self._body:
            for group in GROUPS:
                if own := [field for field in fields if field.group == group]:
                    title(group, 3)
                    with ui.element("div").classes("gw-grid"):
                        for field in own:
                            self._fields[field.name] = field, self._add(field)
        self._resolve()

    def _options(self, name: str) -> dict[str, str] | None:
        """The choices for a setting that the server knows, value -> label; None for one that is typed."""
        checkpoints = {
            run.info.latest_checkpoint: f"{isolated(run.name)}, {run.info.latest_checkpoint.rpartition('/')[2]}"
            for run in self._workspace.newest_first()
            if run.info.latest_checkpoint
        }
        offered: dict[str, Callable[[], dict[str, str]]] = {
            "validation": lambda: {"": "held-out rows"} | self._named_files(),
            "init_from": lambda: {"": "the base model"} | checkpoints,
            "teacher": lambda: {name: name for name in self._models} | checkpoints,
            "reference": lambda: {"start": "the model at the start", "base": "the base model"} | checkpoints,
            "reward": lambda: {name: name for name in rewards()} | checkpoints,
            "grading": lambda: {"": "none: the reward"} | GRADERS,
        }
        return offered[name]() if name in offered else None

    def _add(self, field: Field) -> Any:
        label = field.name.removeprefix("loss.").replace("_", " ")
        options = {each: each for each in field.choices} or self._options(field.name)
        made: Any
        if options is not None:
            default = _text(field.default)
            offered = {default: default} | options if default else options
            typed: Literal["add-unique"] | None = "add-unique" if field.name == "grading" else None
            made = ui.select(offered, value=default, label=label, new_value_mode=typed)
            made.on_value_change(self._resolve)
        elif isinstance(field.default, bool):
            made = ui.checkbox(label, value=field.default)
        else:
            made = ui.input(label).props("stack-label")
        made.props("outlined dense" + (" options-dense hide-bottom-space" if options is not None else ""))
        made.props["hint"] = field.help
        if field.name in ("train_on", "mapping"):
            made.on("blur", self.preview)
            if options is not None:
                made.on_value_change(self.preview)
        made.on("blur", self._resolve)
        return made

    def _texts(self) -> dict[str, str]:
        """The settings that differ from their defaults, as YAML texts."""
        texts = {}
        for name, (field, made) in self._fields.items():
            value = str(made.value if made.value is not None else "")
            if value != str(field.default):
                texts[name] = value.lower() if isinstance(field.default, bool) else value
        return texts

    def _given(self) -> dict[str, Any]:
        if not self._data.value:
            raise ValueError("choose the data: upload a file above, with a row a line")
        return settings_given(self._recipe.value, self._texts(), self._model.value or "", self._data.value)[0]

    def _resolve(self) -> None:
        """Say in each field what its default comes to."""
        file, model = self._files.get(self._data.value or ""), self._models.get(self._model.value or "")
        found: dict[str, str] = {}
        self._summary.text = ""  # type: ignore[attr-defined]
        if file is not None and model is not None:
            try:
                _, settings = settings_given(self._recipe.value, self._texts(), model.name, file.file_id)
            except FAILURES as failure:
                self._summary.text = str(failure)  # type: ignore[attr-defined]
            else:
                found = resolved(settings, model.hidden_size, file.num_lines)
                self._summary.text = summary(settings, model.hidden_size, file.num_lines)  # type: ignore[attr-defined]
        for name, (field, made) in self._fields.items():
            if isinstance(made, ui.input):
                made.props["placeholder"] = found.get(name) or EXAMPLES.get(name) or _text(field.default)

    async def preview(self) -> None:
        """Show the first rows of the data as they are learned, or why they cannot be."""
        self._previews += 1
        number = self._previews
        self._resolve()
        if not self._data.value or self._workspaces.read_only:
            self._rows.clear()
            with self._rows:
                if not self._files:
                    plain("Upload a file with a row a line, by the button beside Data.", "text")
                plain("The first rows of the data stand here, as the model learns them.", "quiet")
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
        try:
            settings = self._given()
        except FAILURES as failure:
            ui.notify(str(failure), type="negative")
            return

        async def work() -> None:
            jobs = self._workspace.service.jobs
            made.append(await jobs.submit(self._recipe.value, settings, name=self._name.value or ""))

        async def start() -> None:
            if await act(self._workspaces, work, "The job is queued."):
                ui.navigate.to(f"/jobs/{made[0].job_id}")

        ask(
            "Start the training", f"The server runs {self._recipe.value} on {settings['model']} by itself.",
            f'job = await service.jobs.submit("{self._recipe.value}", {settings!r})', "Start", start,
        )  # fmt: skip


def _text(default: Any) -> str:
    if isinstance(default, list):
        return f"[{', '.join(map(str, default))}]"
    return "" if default in (None, {}) else str(default)


def _show_row(row: FirstRow) -> None:
    name = f"{row.name}: " if row.name else ""
    left = SHOWN_CHARS
    with ui.element("div"):
        plain(f"{name}{counted(row.num_tokens, 'token')}, {row.num_learned:,} learned", "quiet", tag="div")
        place = ui.element("div").classes("gw-tokens gw-first").props("dir=auto tabindex=0")
    with place:
        for text, on in row.texts:
            shown, left = text[:left], max(0, left - len(text))
            if shown:
                plain(shown + ("…" if not left else ""), "", tag="mark" if on else "span")
