"""`/uploads`: weights that were brought to the server, the runs that began with them, and new ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gradwire
from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Table, button, empty, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import events, ui

from gradwire_console.pages.common import act, ago, ask, on_change, opened, size_of, told
from gradwire_console.workspace import Workspace, Workspaces

COLUMNS = (
    Column("name", "Upload"),
    Column("state", "State", "running: it has not arrived as a whole", state=True),
    Column("kind", "Kind", "adapter: of peft; model: a whole model"),
    Column("base", "Base model"),
    Column("rank", "Rank", num=True),
    Column("runs", "Runs", "Runs that began with its weights"),
    Column("size", "Size", num=True),
    Column("owner", "Owner", sparse=True),
    Column("age", "Age", num=True),
)


def register(workspaces: Workspaces) -> None:
    @page_at("/uploads", title="Uploads · gradwire")
    async def uploads() -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            await _Uploads(workspaces, workspace).show()

        return await opened(workspaces, "/uploads", "/uploads", content)


class _Uploads:
    def __init__(self, workspaces: Workspaces, workspace: Workspace) -> None:
        self._workspaces, self._workspace = workspaces, workspace
        self._chosen: list[str] = []

    async def show(self) -> None:
        with ui.element("div").classes("gw-head"):
            title("Uploads")
            plain("weights from elsewhere, from which runs can begin", "quiet")
            ui.element("div").classes("grow")
            if changes := self._workspace.may_change():
                picker = ui.upload(on_multi_upload=self._upload, multiple=True, auto_upload=True)
                picker.props("accept=.json,.safetensors").style("display: none")
                button("Upload an adapter…", lambda: picker.run_method("pickFiles"), kind="primary")
                button("Begin a run", lambda: self._of_one(self._begin))
                button("Delete", lambda: self._of_one(self._delete), kind="danger")
        self._failed, none = ui.element("div"), ui.element("div")
        with none:
            empty(
                "No upload yet. An adapter of peft is adapter_config.json and adapter_model.safetensors: choose both.",
                'upload = await service.upload_adapter("FOLDER")',
            )
        self._table = Table(
            COLUMNS, (), label="Uploads", search="Search uploads: id, model, run", unit="uploads", instead=none,
            on_chosen=(lambda keys: self._chosen.__setitem__(slice(None), keys)) if changes else None,
        )  # fmt: skip
        sdk_line("await service.list_uploads()")
        await self._refresh()
        on_change(self._workspace, self._refresh)

    async def _refresh(self) -> None:
        with told(self._failed):
            found = await self._workspace.uploads()
            self._table.show([_row(self._workspace, each) for each in reversed(found)])

    async def _upload(self, event: events.MultiUploadEventArguments) -> None:
        async def work() -> None:
            with tempfile.TemporaryDirectory(prefix="gradwire-upload-") as folder:
                for file in event.files:
                    await file.save(Path(folder) / Path(file.name).name)
                await self._workspace.changing_uploads(self._workspace.service.upload_adapter(folder))

        cast(ui.upload, event.sender).reset()  # else it leaves out files that are chosen again after a failure
        if await act(self._workspaces, work, "The adapter is on the server."):
            await self._refresh()

    def _of_one(self, do: Callable[[str], None]) -> None:
        if len(self._chosen) == 1:
            do(self._chosen[0])
        else:
            ui.notify("Select one upload: its box, or x on its row.")

    def _begin(self, upload_id: str) -> None:
        made: list[str] = []

        async def work() -> None:
            run = await self._workspace.service.create_run(from_adapter=upload_id, name=f"from {upload_id}")
            made.append(run.run_id)

        async def do() -> None:
            if await act(self._workspaces, work, "The new run is there."):
                await self._workspace.shows(made[0])
                ui.navigate.to(f"/run/{made[0]}")

        ask(
            f"Begin with {upload_id}", "A new run begins with these weights; a script goes on with it.",
            f'run = await service.create_run(from_adapter="{upload_id}")', "Begin", do,
        )  # fmt: skip

    def _delete(self, upload_id: str) -> None:
        async def work() -> None:
            await self._workspace.changing_uploads(self._workspace.service.delete_upload(upload_id))

        async def do() -> None:
            if await act(self._workspaces, work, "Deleted."):
                await self._refresh()

        ask(
            f"Delete {upload_id}", "Runs that began with it keep their own copy. This cannot be undone.",
            f'await service.delete_upload("{upload_id}")', "Delete", do, typed=upload_id,
        )  # fmt: skip


def _row(workspace: Workspace, each: gradwire.Upload) -> dict[str, Any]:
    began = [run.name for run in workspace.newest_first() if run.info.from_upload == each.upload_id]
    return {
        "key": each.upload_id,
        "name": each.upload_id,
        "name_hint": " ".join(each.warnings),
        "state": "valid" if each.ready else "running",
        "kind": each.kind,
        "base": each.base_model,
        "rank": each.lora["rank"] if each.lora else "",
        "runs": ", ".join(began),
        "size": size_of(each.size_bytes),
        "owner": each.owner,
        "age": ago(each.created_at),
    }
