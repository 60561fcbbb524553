"""`/run/{run_id}/batches`: the recorded batches of a run, token by token as their losses saw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradwire
import numpy as np
from fastapi.responses import RedirectResponse
from gradwire import RecordedBatch, RecordedSequence
from gradwire.charts import text_of
from gradwire_shell.components import Column, Table, button, empty, facts, panel, plain, sdk_line, title
from gradwire_shell.detail import Tokens
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import ago, counted, later, opened_run, run_head, size_of
from gradwire_console.workspace import Workspace, Workspaces

COLUMNS = (
    Column("name", "Operation", "Number of the operation that trained on it", link=True),
    Column("step", "Step", "Optimizer steps before it", num=True),
    Column("loss_fn", "Loss function"),
    Column("loss", "Loss", num=True),
    Column("rows", "Sequences", num=True),
    Column("tokens", "Tokens", num=True),
    Column("age", "Age", num=True),
    Column("size", "Size", num=True),
)
FIGURES = {
    "difference": "trainer less sampler",
    "ratio": "ratio",
    "advantage": "advantage",
    "logprob": "log-probability",
    "mask": "what is scored",
}
VISIBLE = 0.02
"""From which range of a figure on its colours tell tokens apart."""
PAGE = 8
MOST_TOKENS = 2048
"""Tokens of a sequence that are shown."""
DECODED = 1000
EXAMPLE = 'run = await service.create_run("MODEL", lora={"rank": 16}, record_batches=0.01)'


def register(workspaces: Workspaces) -> None:
    @page_at("/run/{run_id}/batches", title="Batches · gradwire")
    async def batches(run_id: str, n: int = 0, page: int = 0) -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            run_head(workspace, run_id, "/batches")
            later(lambda: _batch(workspace, run_id, n, page) if n else _list(workspace, run_id))

        return await opened_run(workspaces, run_id, f"/batches?n={n}&page={page}", content)


async def _list(workspace: Workspace, run_id: str) -> None:
    recordings = [each for each in await workspace.client(run_id).list_recordings() if each.kind == "batch"]
    if not recordings:
        empty("No batch of this run is recorded. A share of them is, with the run's setting:", EXAMPLE)
        return
    rows: list[dict[str, Any]] = [
        {
            "key": str(each.number),
            "href": f"batches?n={each.number}",
            "name": f"{each.operation} {each.number}",
            "step": each.step,
            "loss_fn": each.loss_fn,
            "loss": "" if each.loss is None else text_of("loss", each.loss, 5),
            "rows": each.rows,
            "tokens": f"{each.tokens:,}",
            "age": ago(each.time),
            "size": size_of(each.size_bytes),
        }
        for each in reversed(recordings)
    ]
    Table(COLUMNS, rows, label="Recorded batches", search="Search batches", unit="batches")
    sdk_line(f'await service.get_training_client("{run_id}").list_recordings()')


async def _batch(workspace: Workspace, run_id: str, number: int, page: int) -> None:
    batch = await workspace.client(run_id).recorded_batch(number)
    shown = batch.sequences[page * PAGE : (page + 1) * PAGE]
    texts = await _texts(workspace, workspace.runs[run_id].info.base_model, shown)
    by = _telling(shown)
    with panel(), ui.element("div").classes("gw-head"):
        title(f"{batch.recording.operation} {number}", 2)
        plain(f"{batch.recording.loss_fn}, before step {batch.recording.step + 1}", "quiet")
        ui.element("div").classes("grow")
        chosen = ui.select(FIGURES, value=by, label="Colour by").props("outlined dense options-dense")
        chosen.style("min-width: 12rem")
    with ui.element("div").classes("gw-split"):
        with panel():
            plain(
                "Blue is above the middle, orange below; grey text is not scored. Point at a token for its figures.",
                "quiet",
            )
            tokens = Tokens([_sequence(each, texts) for each in shown], by)
            chosen.on_value_change(lambda event: tokens.colour(event.value))
            _pages(run_id, number, page, len(batch.sequences))
        with ui.element("div"):
            with panel("Batch"):
                facts(_facts(batch))
            with panel("Fields"):
                facts({name: _shape(values) for name, values in batch.fields.items()})
            with panel("In Python"):
                sdk_line(f'batch = await service.get_training_client("{run_id}").recorded_batch({number})')


def _telling(shown: Sequence[RecordedSequence]) -> str:
    """The first figure that differs from token to token; what is scored where none does."""
    for name in FIGURES:
        if name != "mask":
            values = np.concatenate([_values(each, name) for each in shown] or [np.zeros(0)])
            values = values[np.isfinite(values)]
            if len(values) and np.ptp(values) > VISIBLE:
                return name
    return "mask"


def _pages(run_id: str, number: int, page: int, count: int) -> None:
    if count <= PAGE:
        return
    with ui.element("div").classes("gw-head"):
        for word, to in (("Previous", page - 1), ("Next", page + 1)):
            if 0 <= to * PAGE < count:
                path = f"/run/{run_id}/batches?n={number}&page={to}"
                button(word, lambda path=path: ui.navigate.to(path))
        plain(f"{page * PAGE + 1} to {min((page + 1) * PAGE, count)} of {count} sequences", "quiet")


def _facts(batch: RecordedBatch) -> dict[str, object]:
    recording = batch.recording
    differences = np.concatenate([each.logprobs - each.sampler_logprobs for each in batch.sequences] or [np.zeros(0)])
    differences = differences[np.isfinite(differences)]
    rewards = np.array([each.reward for each in batch.sequences])
    rewards = rewards[np.isfinite(rewards)]
    return {
        "Loss": "" if recording.loss is None else text_of("loss", recording.loss, 6),
        "Sequences": recording.rows,
        "Tokens": f"{recording.tokens:,}",
        "Scored tokens": f"{sum(int(each.scored.sum()) for each in batch.sequences):,}",
        "Trainer less sampler": f"{differences.mean():+.2g}, at most {abs(differences).max():.2g}"
        if len(differences)
        else "",
        "Reward": f"{rewards.mean():.4g} ± {rewards.std():.3g}" if len(rewards) else "",
        **{f"{name}": str(value)[:200] for name, value in batch.loss_kwargs.items()},
    }


async def _texts(workspace: Workspace, model: str, sequences: Sequence[RecordedSequence]) -> dict[int, str]:
    """The text of each token; its id where the model has no tokenizer."""
    ids = sorted({int(token) for each in sequences for token in each.token_ids[:MOST_TOKENS]})
    texts: list[str] = []
    try:
        for start in range(0, len(ids), DECODED):
            texts += await workspace.service.decode(model, [[token] for token in ids[start : start + DECODED]])
    except (gradwire.UnsupportedError, gradwire.UnknownModelError):
        texts = [f" {token}" for token in ids]
    return dict(zip(ids, texts))


def _values(each: RecordedSequence, figure: str) -> Any:
    return {"ratio": each.ratios, "difference": each.logprobs - each.sampler_logprobs, "advantage": each.advantages,
            "logprob": each.logprobs}[figure]  # fmt: skip


def _sequence(each: RecordedSequence, texts: dict[int, str]) -> dict[str, Any]:
    ids = each.token_ids[:MOST_TOKENS].tolist()
    left = len(each.token_ids) - len(ids)
    said = [f"{counted(len(each.token_ids), 'token')}, {int(each.scored.sum()):,} scored"]
    said += [f"reward {each.reward:.4g}"] if np.isfinite(each.reward) else []
    said += [f"the last {left:,} are not shown"] if left else []
    return {
        "label": f"Row {each.row}" + (f", {each.part}" if each.part else ""),
        "facts": ", ".join(said),
        "texts": [texts.get(token, str(token)) for token in ids],
        "ids": ids,
        "scored": each.scored[: len(ids)].tolist(),
        "logprob": _column(each.logprobs, len(ids)),
        "sampler": _column(each.sampler_logprobs, len(ids)),
        "advantage": _column(each.advantages, len(ids)),
    }


def _column(values: Any, count: int) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values[:count].tolist()]


def _shape(values: Any) -> str:
    if isinstance(values, list):
        return counted(len(values), "row")
    return f"{values.dtype} {list(values.shape)}"
