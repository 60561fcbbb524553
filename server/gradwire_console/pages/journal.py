"""`/run/{run_id}/journal`: the newest operations of a run, where their time went, and what a recovery would cost."""

from __future__ import annotations

from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire import OperationInfo
from gradwire_shell.components import Column, Drawn, Table, button, facts, panel, plain, sdk_line
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import act, ago, ask, on_change, opened_run, run_head, size_of, told
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

COLUMNS = (
    Column("seq", "Nr.", "The operation's number in the run", num=True),
    Column("operation", "Operation"),
    Column("loss_fn", "Loss function"),
    Column("state", "State", "waiting: for a missing number; queued: for its turn at the engine", state=True),
    Column("error", "Error", sparse=True),
    Column("front", "Front", "The journal on disk, the way to the engine and back", num=True),
    Column("queue", "Queue", "Waiting for earlier operations, and for other runs", num=True),
    Column("engine", "Engine", "Computing", num=True),
    Column("size", "Payload", "Tensors of the operation", num=True),
    Column("tries", "Tries", "How often it was sent to an engine; engines that died of it", num=True),
    Column("age", "Age", "Since it was accepted", num=True),
)


def register(workspaces: Workspaces) -> None:
    @page_at("/run/{run_id}/journal", title="Journal · gradwire")
    async def journal(run_id: str) -> RedirectResponse | None:
        return await opened_run(workspaces, run_id, "/journal", lambda workspace: _show(workspaces, workspace, run_id))


async def _show(workspaces: Workspaces, workspace: Workspace, run_id: str) -> None:
    chosen: list[str] = []
    run_head(workspace, run_id, "/journal")
    failed = ui.element("div")
    with ui.element("div").classes("gw-split"):
        with ui.element("div"):
            if changes := workspace.may_change(workspace.runs[run_id].info.owner):
                with ui.element("div").classes("gw-actions"):
                    button("Cancel selected", lambda: _cancel(workspaces, workspace, run_id, sorted(map(int, chosen))))
            table = Table(
                COLUMNS, (), label="Operations", search="Search operations: kind, state, error", unit="operations",
                none="None since the server started.",
                on_chosen=(lambda keys: chosen.__setitem__(slice(None), keys)) if changes else None,
            )  # fmt: skip
        with ui.element("div"):
            with panel("A recovery now"):
                cost = Drawn()
            with panel("In Python"):
                sdk_line(f'activity = await service.get_training_client("{run_id}").activity()')
                plain("The server keeps the newest 256 that have a result.", "quiet")

    async def refresh() -> None:
        live = workspace.runs.get(run_id)
        with told(failed):
            activity = await workspace.activity(run_id)
            table.show([_row(each) for each in activity.operations])
            cost.show(_cost(activity, live), facts)

    await refresh()
    on_change(workspace, refresh)


def _cancel(workspaces: Workspaces, workspace: Workspace, run_id: str, numbers: list[int]) -> None:
    if not numbers:
        ui.notify("Select operations without a result: the boxes, or x on a row.")
        return
    run, kept = workspace.client(run_id), list[int]()

    async def work() -> None:
        kept.extend([seq for seq in numbers if not await run.cancel_operation(seq)])

    async def do() -> None:
        if await act(workspaces, work, ""):
            done = f"{len(numbers) - len(kept)} of {len(numbers)} cancelled."
            ui.notify(done + (" The others have ended, or cannot be stopped." if kept else ""))

    ask(
        f"Cancel {len(numbers)} operation{'s' * (len(numbers) > 1)}",
        "The script that submitted them is told so, and goes on as the run's writer. What was queued behind them and"
        " counted on them fails, up to the next optimizer step.",
        f"for seq in {numbers}: await run.cancel_operation(seq)", "Cancel them", do,
    )  # fmt: skip


def _cost(activity: gradwire.RunActivity, live: LiveRun | None) -> dict[str, object]:
    newest = live.info.latest_checkpoint.rpartition("/")[2] if live is not None else ""
    behind = live.info.accepted_seq - live.info.applied_seq if live is not None else 0
    return {
        "Costs": f"{activity.loading_s + activity.replay_s:.2f} s",
        "Load": f"{activity.loading_s:.2f} s, {newest or 'from the base model'}",
        "Repeat": f"{activity.replay_s:.2f} s of computing",
        "Without a result": behind,
        "Recoveries": f"{activity.recoveries} since the server started",
        "Computed": f"{live.info.engine_s:.1f} s of the engine" if live is not None else "",
        "Cheaper with": 'await run.save_checkpoint("NAME")' if activity.replay_s > 1 else "",
    }


def _row(each: OperationInfo) -> dict[str, Any]:
    ended = each.state in ("succeeded", "failed", "cancelled")
    tries = ("2 or more" if each.retried else "1") if each.state not in ("waiting", "queued") else ""
    return {
        "key": str(each.seq),
        "seq": each.seq,
        "operation": each.operation,
        "loss_fn": each.loss_fn,
        "state": each.state,
        "front": _seconds(each.front_s) if ended else "",
        "queue": _seconds(each.queue_s),
        "engine": _seconds(each.engine_s) if ended else "",
        "size": size_of(each.payload_bytes) if each.payload_bytes else "",
        "tries": tries + (f", {each.deaths} died" if each.deaths else ""),
        "age": ago(each.accepted_at),
        "error": each.error,
        "error_hint": each.error,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
