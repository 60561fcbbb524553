"""Snapshots of a server, taken through the SDK, and their tables for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gradwire import sync
from gradwire.cli.listing import fits
from gradwire.cli.text import duration, plain, precise, size
from gradwire.descriptions import EngineInfo, ModelInfo, RankInfo, RunInfo, ServerInfo

Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, from which the rates are taken.")]


@dataclass(frozen=True)
class Snapshot:
    """State of a server at one moment.

    Attributes:
        at: Monotonic time in seconds.
        info: Version, status and limits.
        models: Its models.
        runs: The runs that the key may read, by run id.
    """

    at: float
    info: ServerInfo
    models: list[ModelInfo]
    runs: dict[str, RunInfo]

    @property
    def working(self) -> bool:
        """Whether a run has operations without a result."""
        return any(run.accepted_seq > run.applied_seq for run in self.runs.values())


def look(service: sync.ServiceClient) -> Snapshot:
    """Take a snapshot."""
    info, models, runs = service.server_info(), service.list_models(), service.list_runs()
    return Snapshot(time.monotonic(), info, models, {run.run_id: run for run in runs})


def draw(now: Snapshot, before: Snapshot | None = None, *, most: int = 0) -> RenderableType:
    """Render the server, its engine, its models and its runs, those with the most queued operations first.

    Args:
        before: An earlier snapshot, for the rates.
        most: Maximum number of runs shown, or of their lines in a narrow terminal; 0 for all.
    """
    info = now.info
    state = Text("ready", "green") if info.engine_ready else Text("not ready", "bold red")
    head = Text.assemble(
        f"gradwire {plain(info.version)} on {plain(info.device)}, engine ", state,
        f", up {duration(info.uptime_s)}, durability {plain(info.durability)}",
    )  # fmt: skip
    queued = sum(waiting(run) for run in now.runs.values())
    parts = [f"{len(now.runs)} runs", f"{queued} operations queued"]
    parked = [
        Text(f"run {plain(run.run_id)} is parked: {plain(run.parked)}", "bold red")
        for run in now.runs.values()
        if run.parked
    ]
    kept = [
        Text(f"run {plain(run.run_id)} waits for {plain(run.waits_for)}", "yellow")
        for run in now.runs.values()
        if run.waits_for
    ]
    parts += [f"{len(parked)} parked"] if parked else []
    runs_s = sum(run.recovery_s for run in now.runs.values())
    engine_s = max((engine.start_s for engine in info.engines), default=0.0)
    parts.append(f"recovery {precise(engine_s + runs_s)} (engine {precise(engine_s)}, runs {precise(runs_s)})")
    engines = [
        Text(line)
        for engine in info.engines
        for line in _engine(engine, alone=len(info.engines) == 1 and not engine.machine)
    ]
    runs = [_Runs(now, before, most)] if now.runs else []
    return Group(head, Text(", ".join(parts)), *engines, *parked, *kept, _models(now.models), *runs)


def _engine(engine: EngineInfo, *, alone: bool) -> Iterator[str]:
    """The lines about an engine, with its number and readiness if there are others."""
    parts = []
    if not alone:
        state = ("draining" if engine.drains else "ready") if engine.ready else "not ready"
        where = f" of {plain(engine.machine)}" if engine.machine else ""
        parts = [f"engine {engine.number} on {plain(engine.device)}{where}: {state}", f"{engine.placed_runs} runs"]
    parts += [f"busy {engine.busy:.0%}", *_memory(engine)]
    if engine.device_utilization is not None:
        parts.append(f"device {engine.device_utilization:.0%}")
    places = [f"{each.runs} {plain(place)} {size(each.nbytes)}" for place, each in engine.runs.items() if each.runs]
    parts += [f"runs held: {' + '.join(places)}"] if places else []
    yield ", ".join([*parts, f"heartbeat {engine.heartbeat_age_s:.1f} s ago", f"{engine.restarts} restarts"])
    owners = [f"{plain(owner)} {size(count)}" for owner, count in engine.memory_by_owner.items() if count]
    if owners:
        yield "memory of " + ", ".join(owners)
    for number, rank in enumerate(engine.ranks):
        parts = [f"rank {number} on {plain(rank.device)}: busy {rank.busy:.0%}, waits {rank.waits:.0%}"]
        parts += _memory(rank)
        yield ", ".join([*parts, f"heartbeat {rank.heartbeat_age_s:.1f} s ago"])


def _memory(of: EngineInfo | RankInfo) -> list[str]:
    """Memory of a process and of its device."""
    parts = [f"memory {size(of.memory_bytes)}"]
    if of.device_memory_total_bytes:
        parts.append(f"device memory {size(of.device_memory_used_bytes)} of {size(of.device_memory_total_bytes)}")
    return parts


def _models(models: list[ModelInfo]) -> Table:
    table = Table()
    for column in ("model", "architecture", "parameters", "context", "dtype", "tokenizer"):
        table.add_column(column, overflow="fold")
    for model in models:
        table.add_row(
            Text(plain(model.name)), Text(plain(model.architecture)), f"{model.num_parameters:,}",
            str(model.context_length), plain(model.dtype), "yes" if model.has_tokenizer else "no",
        )  # fmt: skip
    return table


class _Runs:
    """The runs as a table; where the terminal is narrower than the table, two or three lines for each run."""

    def __init__(self, now: Snapshot, before: Snapshot | None, most: int) -> None:
        self._now, self._before, self._most = now, before, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        if fits(table, options, console):
            yield table
            return
        runs, hidden = self._first(max(self._most // 3, 1) if self._most else 0)
        for run in runs:
            run_id, name, model, step, queue, done, operations, steps, tokens, recovery, checkpoint = self._cells(run)
            yield Text.assemble("\n", (run_id, "bold"), f" {name}")
            yield Text(f"  model {model}, step {step}" + (f", checkpoint {checkpoint}" if checkpoint else ""))
            rates = f", {operations} ops/s, {steps} steps/s, {tokens} tokens/s" if operations != "-" else ""
            yield Text(f"  queue {queue}, done {done}{rates}, recovery {recovery}")
        yield Text(f"\nand {hidden} more\n" if hidden else "")

    def _table(self) -> Table:
        runs, hidden = self._first(self._most)
        table = Table(caption=f"and {hidden} more" if hidden else None)
        for column in ("run", "name", "model"):
            table.add_column(column, overflow="fold")
        for column in ("step", "queue", "done", "ops/s", "steps/s", "tokens/s", "recovery"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("checkpoint", overflow="fold")
        for run in runs:
            table.add_row(*map(Text, self._cells(run)))
        return table

    def _first(self, most: int) -> tuple[list[RunInfo], int]:
        """Return the runs that are shown, and the number of the others."""
        runs = sorted(self._now.runs.values(), key=lambda run: (-waiting(run), -run.created_at))
        return runs[: most or None], max(len(runs) - most, 0) if most else 0

    def _cells(self, run: RunInfo) -> tuple[str, ...]:
        before = self._before
        earlier = before.runs.get(run.run_id) if before is not None else None
        seconds = self._now.at - before.at if before is not None else 0.0
        return (
            plain(run.run_id), plain(run.name), plain(run.base_model), str(run.step), str(waiting(run)),
            str(run.applied_seq), rate(run.applied_seq, earlier.applied_seq if earlier else None, seconds),
            rate(run.step, earlier.step if earlier else None, seconds),
            rate(run.num_tokens, earlier.num_tokens if earlier else None, seconds),
            precise(run.recovery_s), plain(run.latest_checkpoint.partition("/")[2]),
        )  # fmt: skip


def waiting(run: RunInfo) -> int:
    """Number of operations of a run without a result."""
    return max(run.accepted_seq - run.applied_seq, 0)


def rate(now: int, before: int | None, seconds: float) -> str:
    """Format the rate per second between two snapshots: "-" without an earlier one, 0 for a count that fell."""
    if before is None or seconds <= 0:
        return "-"
    per_second = max(now - before, 0) / seconds
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
