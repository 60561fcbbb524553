"""Actions on a checkpoint (save, fork, try, export, delete), each with the code that does the same."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gradwire
from gradwire.gguf_file import FORMS as GGUF_FORMS
from gradwire.gguf_file import write_gguf
from nicegui import background_tasks, ui

from gradwire_console.pages.common import act, ask
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

FORMS = {
    "auto": "as it was trained: the adapter for peft, or the whole model",
    "merged": "a whole model for transformers, the adapter merged into its base",
    **{name: f"a GGUF file for llama.cpp, {name}" for name in GGUF_FORMS},
}
KEPT_S = 600.0
"""Seconds for which an export stays on the console's machine after its download has begun."""


def save(workspaces: Workspaces, workspace: Workspace, live: LiveRun) -> None:
    """Ask whether to save a checkpoint of a run as it is."""
    run_id, name = live.info.run_id, f"step-{live.info.step}"

    async def work() -> None:
        await workspace.client(run_id).save_checkpoint(name)

    async def do() -> None:
        await act(workspaces, work, "The checkpoint is saved.")

    ask(
        f"Save {name}",
        "This takes the run over from its writer: a script that trains it is told so, and stops."
        if live.state == "training"
        else "The run's weights and optimizer state are saved.",
        f'await run.save_checkpoint("{name}")',
        "Save",
        do,
    )


def fork(workspaces: Workspaces, workspace: Workspace, checkpoint: gradwire.Checkpoint) -> None:
    """Ask whether to begin a new run with a checkpoint's weights, and open it."""
    made: list[str] = []

    async def work() -> None:
        run = await workspace.service.fork_run(checkpoint.path, name=f"fork of {checkpoint.name}")
        made.append(run.run_id)

    async def do() -> None:
        if await act(workspaces, work, "The new run is there."):
            await workspace.shows(made[0])
            ui.navigate.to(f"/run/{made[0]}")

    ask(
        f"Fork {checkpoint.name}", f"A new run begins with these weights, at step {checkpoint.step} of this one.",
        f'run = await service.fork_run("{checkpoint.path}")', "Fork", do,
    )  # fmt: skip


def try_out(checkpoints: Sequence[gradwire.Checkpoint]) -> None:
    """Open the playground with checkpoints side by side."""
    ui.navigate.to("/playground?models=" + ",".join(each.path for each in checkpoints))


def delete(workspaces: Workspaces, workspace: Workspace, checkpoint: gradwire.Checkpoint) -> None:
    """Ask for a checkpoint's name, and delete it."""

    async def do() -> None:
        await act(workspaces, lambda: workspace.delete_checkpoint(checkpoint), "Deleted.")

    ask(
        f"Delete {checkpoint.name}", "Runs that were forked from it keep their weights. This cannot be undone.",
        f'await run.delete_checkpoint("{checkpoint.name}")', "Delete", do, typed=checkpoint.name,
    )  # fmt: skip


def export(workspaces: Workspaces, workspace: Workspace, checkpoint: gradwire.Checkpoint) -> None:
    """Ask for the form of a checkpoint's export, and download it."""
    chosen = ["auto"]

    def choose() -> None:
        field = ui.select(FORMS, value="auto", label="Form", on_change=lambda event: chosen.__setitem__(0, event.value))
        field.props("outlined dense options-dense").classes("full-width")

    async def do() -> None:
        notice = ui.notification(f"Exporting {checkpoint.name}…", spinner=True, timeout=None)
        archives: list[Path] = []

        async def work() -> None:
            archives.append(await _archive(workspace.service, checkpoint, chosen[0]))

        try:
            if await act(workspaces, work, ""):
                ui.download.file(archives[0])
                background_tasks.create(_remove_later(archives[0].parent))
        finally:
            notice.dismiss()

    ask(
        f"Export {checkpoint.name}",
        "The browser downloads it as one file. It is taken from a fork, which is deleted then: the run goes on.",
        f'run = await service.fork_run("{checkpoint.path}"); await run.export("FOLDER")', "Export", do, body=choose,
    )  # fmt: skip


async def _archive(service: gradwire.ServiceClient, checkpoint: gradwire.Checkpoint, form: str) -> Path:
    """A file with the export, alone in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="gradwire-export-"))
    try:
        run = await service.fork_run(checkpoint.path, name="export")
        try:
            whole = form in GGUF_FORMS
            await run.export(folder / "export", "merged" if form != "auto" else "auto")
        finally:
            await service.delete_run(run.run_id)
        if whole:
            file = folder / f"{checkpoint.name}-{form}.gguf"
            await asyncio.to_thread(write_gguf, folder / "export", file, form)
        else:
            base = str(folder / f"{checkpoint.name}-{form}")
            file = Path(await asyncio.to_thread(shutil.make_archive, base, "tar", folder / "export"))
        await asyncio.to_thread(shutil.rmtree, folder / "export")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return file


async def _remove_later(folder: Path) -> None:
    try:
        await asyncio.sleep(KEPT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
