"""`/`: every run with its live state."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Table, button, empty, plain, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import ago, isolated, on_change, opened, short
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

COLUMNS = (
    Column("name", "Run", link=True),
    Column("state", "State", "training: it has worked in the last seconds; parked: it cannot be restored", state=True),
    Column("step", "Step", "Optimizer steps taken", num=True),
    Column("pace", "Tokens/s", "Tokens that went through the model in the last 20 seconds, per second", num=True),
    Column("tokens", "Tokens", "Tokens that went through the model", num=True),
    Column("queue", "Queue", "Operations that are accepted and have no result", num=True),
    Column("recovery", "Recovery", "What a recovery would take now: load the newest checkpoint, repeat what follows it",
           num=True),
    Column("base", "Base model"),
    Column("trains", "Trains"),
    Column("owner", "Owner", "Name of the key that created the run", sparse=True),
    Column("age", "Age", num=True),
)  # fmt: skip
IDLE = "whether its program has ended or crashed is not known"
EXAMPLE = 'run = await service.create_run("MODEL", lora={"rank": 16}, name="first")'


def row_of(run: LiveRun) -> dict[str, Any]:
    info = run.info
    return {
        "key": info.run_id,
        "href": f"run/{info.run_id}",
        "name": run.name,
        "name_sub": ", ".join(isolated(f"{key}={value}") for key, value in info.tags.items()),
        "name_hint": info.run_id,
        "state": run.state,
        "state_hint": info.parked or (IDLE if run.state == "idle" else ""),
        "step": f"{info.step:,}",
        "pace": short(run.tokens_per_s) if run.tokens_per_s else "",
        "tokens": short(info.num_tokens) if info.num_tokens else "",
        "queue": str(info.accepted_seq - info.applied_seq or ""),
        "recovery": f"{info.recovery_s:.1f} s" if info.recovery_s else "",
        "base": info.base_model,
        "trains": trains(run),
        "owner": info.owner,
        "age": ago(info.created_at),
    }


def trains(run: LiveRun) -> str:
    """What of the model a run trains: the adapter's rank or all weights, and the head."""
    lora = run.info.lora
    return (f"LoRA {lora['rank']}" if lora else "all weights") + (f", {run.info.head} head" if run.info.head else "")


def register(workspaces: Workspaces) -> None:
    @page_at("/", title="Runs · gradwire")
    async def runs() -> RedirectResponse | None:
        return await opened(workspaces, "/", "/", _show)


async def _show(workspace: Workspace) -> None:
    chosen: list[str] = []

    def compare() -> None:
        if len(chosen) < 2:
            ui.notify("Select two runs or more: the boxes, or x on a row.")
        else:
            ui.navigate.to("/compare?runs=" + ",".join(chosen))

    with ui.element("div").classes("gw-head"):
        title("Runs")
        figures = plain("", "quiet")
        ui.element("div").classes("grow")
        button("Compare selected", compare)
    none = ui.element("div")
    with none:
        empty("No run yet. A script creates one, and it appears here:", EXAMPLE)
    table = Table(
        COLUMNS, (), label="Runs", search="Search runs: name, state, model, owner, tag", unit="runs", instead=none,
        on_chosen=lambda keys: chosen.__setitem__(slice(None), keys),
    )  # fmt: skip

    async def show() -> None:
        with suppress(gradwire.GradwireError):
            await workspace.jobs()
        live = workspace.newest_first()
        states = [run.state for run in live]
        words = [f"{states.count(word)} {word}" for word in ("training", "parked") if word in states]
        pace = sum(run.tokens_per_s for run in live)
        figures.text = ", ".join([*words, f"{short(pace)} tokens/s"]) if live else ""  # type: ignore[attr-defined]
        table.show([row_of(run) for run in live])

    await show()
    on_change(workspace, show)
