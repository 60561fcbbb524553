"""`/run/{run_id}`: a run's curves, operations, checkpoints and settings, and what can be done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire.charts import text_of
from gradwire_shell.components import (
    Column,
    Drawn,
    Items,
    Lines,
    Table,
    button,
    empty,
    error,
    facts,
    named,
    panel,
    plain,
    sdk_line,
    state,
    title,
)
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.advice import Advice, advise
from gradwire_console.pages import checkpoint_actions as actions
from gradwire_console.pages.checkpoints import measured
from gradwire_console.pages.common import act, ago, ask, on_change, opened_run, run_views, short, size_of
from gradwire_console.pages.curves import Curves
from gradwire_console.pages.runs import IDLE, trains
from gradwire_console.series import Operation, Record
from gradwire_console.workspace import LiveRun, Server, Workspace, Workspaces

OPERATIONS = (
    Column("seq", "Nr.", "The operation's number in the run", num=True),
    Column("operation", "Operation"),
    Column("loss_fn", "Loss function"),
    Column("step", "Step", num=True),
    Column("loss", "Loss", num=True),
    Column("tokens", "Tokens", num=True),
    Column("engine", "Engine", "Seconds of computing", num=True),
    Column("ended", "Age", "Since it ended", num=True),
)

TRAINING = ("forward_backward", "backward", "optim_step", "train_step", "load_checkpoint")
"""Operations that change gradient or weights; the first two leave a gradient."""
NEWEST, SHOWN_OPERATIONS = 5, 12
"""Checkpoints and operations that are shown here; their own pages have all."""


def register(workspaces: Workspaces) -> None:
    @page_at("/run/{run_id}", title="Run · gradwire")
    async def run(run_id: str, axis: str = "", mean: int = 1, large: str = "") -> RedirectResponse | None:
        shown = {"axis": axis, "mean": mean, "large": large}
        return await opened_run(
            workspaces, run_id, "", lambda workspace: _Run(workspaces, workspace, run_id).show(shown)
        )


class _Run:
    def __init__(self, workspaces: Workspaces, workspace: Workspace, run_id: str) -> None:
        self._workspaces, self._workspace, self._run_id = workspaces, workspace, run_id
        self._checkpoints: list[gradwire.Checkpoint] = []
        self._measured: dict[str, dict[str, str]] = {}

    @property
    def _live(self) -> LiveRun | None:
        return self._workspace.runs.get(self._run_id)

    async def show(self, shown: Mapping[str, Any]) -> None:
        """Show the page, with its curves as the address says."""
        live = self._live
        assert live is not None
        asked = self._ask()
        await asyncio.sleep(0)  # so that both are on their way while the page is built
        with ui.element("div").classes("gw-head"):
            title(live.name)
            self._state = Drawn()
            run_views(self._run_id, "")
            if live.job_id:
                ui.link("Its job", f"/jobs/{live.job_id}").classes("gw-link")
            ui.element("div").classes("grow")
            own = self._workspace.may_change(live.info.owner)
            with ui.element("div").classes("gw-actions"):
                if own:
                    button("Save checkpoint", self._save)
                if self._workspace.may_change():
                    button("Export", self._export)
                if own:
                    button("Delete", self._delete, kind="danger")
        self._away = ui.element("div")
        self._advice = ui.element("div").classes("gw-stack")
        self._advised: list[Advice] = []
        with ui.element("div").classes("gw-split run"):
            with ui.element("div"):
                with panel("Now"):
                    self._now = Drawn()
                with panel("Checkpoints"):
                    self._none_saved = ui.element("div")
                    with self._none_saved:
                        empty("None yet.", 'await run.save_checkpoint("NAME")')
                    self._saves = Items()
                    self._all_saves = ui.link("", f"/run/{self._run_id}/checkpoints").classes("gw-link")
            with ui.element("div"):
                self._curves = Curves(**shown)
                with panel("Newest operations"):
                    self._operations = Table(OPERATIONS, (), label="Operations", none="None yet.")
                    ui.link("The journal has more", f"/run/{self._run_id}/journal").classes("gw-link")
            with ui.element("div"):
                with panel("Settings"):
                    _settings(live)
                with panel("Resume it in Python"):
                    sdk_line(resuming(self._workspaces.server, self._run_id))
        await self._refresh(asked)
        on_change(self._workspace, self._refresh)

    def _ask(self) -> asyncio.Future[tuple[Record, list[gradwire.Checkpoint]]]:
        return asyncio.gather(self._workspace.record(self._run_id), self._workspace.checkpoints(self._run_id))

    async def _refresh(self, asked: Awaitable[tuple[Record, list[gradwire.Checkpoint]]] | None = None) -> None:
        live = self._live
        self._away.clear()
        if live is None:
            with self._away:
                error("The run was deleted, or is no longer shared with this key.")
            return
        self._state.show((live.state, live.info.parked), lambda shown: state(*shown))
        try:
            record, found = await (asked or self._ask())
            self._now.show(_now(live) | _left(live, record, found), facts)
            self._show_checkpoints(found, record)
        except gradwire.GradwireError as failure:
            self._now.show(_now(live), facts)
            with self._away:
                error(str(failure))
            return
        self._advise(advise(record, await self._workspace.vocab_size(self._run_id)))
        self._curves.show({live.name: record})
        self._operations.show([_operation(each) for each in list(record.operations)[: -SHOWN_OPERATIONS - 1 : -1]])

    def _advise(self, advice: list[Advice]) -> None:
        if advice != self._advised:
            self._advised = advice
            self._advice.clear()
            with self._advice:
                for each in advice:
                    with ui.element("div").classes("gw-note").props("role=status"):
                        plain(f"{each.what} ", "gw-flag")
                        plain(each.remedy)

    def _show_checkpoints(self, checkpoints: list[gradwire.Checkpoint], record: Record) -> None:
        self._checkpoints = checkpoints
        self._measured = {each.path: measured(record, each) for each in checkpoints[-NEWEST:]}  # anew: some come later
        self._none_saved.set_visibility(not checkpoints)
        self._all_saves.text = f"All {len(checkpoints)}"
        self._all_saves.set_visibility(len(checkpoints) > NEWEST)

        def draw(each: gradwire.Checkpoint) -> Callable[[gradwire.Checkpoint], object]:
            with ui.element("div").classes("grow"):
                plain(each.name, "mono", tag="div")
                lines = Lines(classes="quiet")
            if self._workspace.may_change():
                self._button("Fork", partial(actions.fork, self._workspaces, self._workspace, each), each)
            if self._workspace.may_sample:
                self._button("Try", partial(actions.try_out, [each]), each)
            return lambda now: lines.show(_about(now, self._measured[now.path]))

        # A checkpoint that was saved again under its name is another.
        self._saves.show({f"{each.path} {each.created_at}": each for each in checkpoints[: -NEWEST - 1 : -1]}, draw)

    def _button(self, text: str, do: Callable[[], object], checkpoint: gradwire.Checkpoint) -> None:
        named(button(text, do).props("dense"), f"{text} {checkpoint.name}")

    def _save(self) -> None:
        if (live := self._live) is not None:
            actions.save(self._workspaces, self._workspace, live)

    def _export(self) -> None:
        if self._checkpoints:
            actions.export(self._workspaces, self._workspace, self._checkpoints[-1])
        else:
            ui.notify("Save a checkpoint first: an export is made of one.")

    def _delete(self) -> None:
        live = self._live
        if live is None:
            return
        name = live.name

        async def do() -> None:
            if await act(self._workspaces, lambda: self._workspace.service.delete_run(self._run_id), "Deleted."):
                ui.navigate.to("/")

        ask(
            "Delete the run", "Its checkpoints, its journal and its record go with it. This cannot be undone.",
            f'await service.delete_run("{self._run_id}")', "Delete", do, typed=name,
        )  # fmt: skip


def _about(each: gradwire.Checkpoint, values: dict[str, str]) -> list[str]:
    about = [f"step {each.step:,}", size_of(each.size_bytes), f"{ago(each.created_at)} old".replace(" ", "\u00a0")]
    figures = ", ".join(f"{name} {value}" for name, value in values.items())
    return [text for text in (", ".join(filter(None, [*about, each.note])), figures) if text]


def _now(live: LiveRun) -> dict[str, object]:
    info = live.info
    return {
        "Parked": info.parked,
        "Waits for": info.waits_for,
        "Step": f"{info.step:,}",
        "Tokens/s": short(live.tokens_per_s) if live.tokens_per_s else "0",
        "Tokens": short(info.num_tokens),
        "Computed": f"{info.engine_s:,.1f} s",
        "Queue": f"{info.accepted_seq - info.applied_seq} without a result",
        "Recovery": f"{info.recovery_s:.1f} s, if the engine died now",
        "Newest checkpoint": info.latest_checkpoint.rpartition("/")[2],
        "Engine": info.engine,
    }


def _left(live: LiveRun, record: Record, checkpoints: list[gradwire.Checkpoint]) -> dict[str, object]:
    """Signs that a run was left unfinished: its idle time, steps without a checkpoint, an unused gradient."""
    if live.state != "idle" or not record.operations:
        return {}
    last = record.operations[-1]
    unsaved = live.info.step - (checkpoints[-1].step if checkpoints else 0)
    known = unsaved > 0 and (checkpoints or not live.info.forked_from)
    trained = [each.operation for each in record.operations if each.operation in TRAINING]
    return {
        "Idle": f"since {last.operation} {last.seq}, {ago(last.time)} ago; {IDLE}",
        "Unsaved": f"{unsaved:,} {'steps are' if unsaved > 1 else 'step is'} in no checkpoint" if known else "",
        "Unfinished": "the newest gradient has no optim_step yet" if trained and trained[-1] in TRAINING[:2] else "",
    }


def resuming(server: Server, run_id: str) -> str:
    """The lines that go on with a run."""
    trusted = f", ca_cert={str(server.ca_cert)!r}" if server.ca_cert is not None else ""
    return (
        f"service = await gradwire.connect({server.address!r}{trusted})\nrun = service.get_training_client({run_id!r})"
    )


def _settings(live: LiveRun) -> None:
    info = live.info
    lora = info.lora or {}
    facts(
        {
            "Id": info.run_id, "Base model": info.base_model, "Trains": trains(live),
            "Alpha": lora.get("alpha", ""), "Target modules": ", ".join(lora.get("target_modules", ())),
            "Parameters": short(info.num_trainable_parameters), "Dropout": info.dropout or "", "Seed": info.seed,
            "Forked from": info.forked_from, "Owner": info.owner, "Shared with": ", ".join(info.readers),
            **{f"Tag {key}": value for key, value in info.tags.items()},
            **{f"Changed at {change.seq}": change.note for change in info.changes},
        }
    )  # fmt: skip


def _operation(each: Operation) -> dict[str, Any]:
    return {
        "key": f"{each.run_id}/{each.seq}",
        "seq": each.seq,
        "operation": each.operation,
        "loss_fn": each.loss_fn,
        "step": each.step,
        "loss": "" if each.loss is None else text_of("loss", each.loss, 5),
        "tokens": f"{each.tokens:,}" if each.tokens else "",
        "engine": f"{each.seconds:.3f} s",
        "ended": ago(each.time),
    }
