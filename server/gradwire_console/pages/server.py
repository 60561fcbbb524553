"""`/server`: the engines with their memory, who waits for whom, and what each key has used."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire import EngineInfo, QueuedRun
from gradwire_shell.components import Column, Drawn, Table, facts, panel, plain, sdk_line, state, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import ago, cost_of, opened, short, size_of, told
from gradwire_console.workspace import LiveRun, Workspace, Workspaces

LOOK_S = 1.0
QUEUES = (
    Column("name", "Run", link=True),
    Column("owner", "Key", sparse=True),
    Column("state", "State", state=True),
    Column("operation", "First operation"),
    Column("executing", "At the engine", "Operations that are computed, or about to be", num=True),
    Column("waiting", "Waiting", "Operations that wait for their turn", num=True),
    Column("bytes", "Payloads", num=True),
    Column("oldest", "Oldest", "Since the oldest of them was accepted", num=True),
    Column("behind", "Waits for", "Runs of the same engine that are computed now; keys take turns"),
)
USAGE = (
    Column("key", "Key"),
    Column("runs", "Runs", num=True),
    Column("training", "Training", num=True),
    Column("tokens", "Tokens", "Tokens that went through a model, in training and in sampling", num=True),
    Column("seconds", "Engine", "Seconds of engines; of what is computed together, each has its share", num=True),
    Column("share", "Share", "Of the engines' seconds", num=True),
    Column(
        "cost", "Cost", "By the price of an hour of an engine: gradwire serve --price-per-hour", num=True, sparse=True
    ),
    Column("recovery", "Recovery", "What bringing its runs back would take now", num=True),
)
KEYS = (
    Column("name", "Key"),
    Column("role", "Role", "user: its own runs; viewer: reads everything; admin: everything; engine: lends an engine"),
    Column("state", "State", state=True),
    Column("runs", "Runs", num=True),
    Column("quota", "Quota", "Its limits, where they are not the server's", sparse=True),
    Column("age", "Age", num=True),
)
KEYS_LOOK_S = 10.0
PARTS = ("base", "references", "runs", "cache", "activations")


def register(workspaces: Workspaces) -> None:
    @page_at("/server", title="Server · gradwire")
    async def server() -> RedirectResponse | None:
        return await opened(workspaces, "/server", "/server", _show)


async def _show(workspace: Workspace) -> None:
    title("Server")
    failed = ui.element("div")
    with ui.element("div").classes("gw-split"):
        with ui.element("div"):
            with panel("Who waits for whom"):
                queues = Table(QUEUES, (), label="Queues", none="Nothing waits: every operation has its result.")
            with panel("Usage by key, last 30 days"):
                usage = Table(USAGE, (), label="Usage by key", none="No run yet.")
            with panel("Usage by run"):
                runs = Table(
                    _run_columns(), (), label="Usage by run", search="Search runs", unit="runs", none="No run yet."
                )
            with panel("Keys") as all_keys:
                keys = Table(KEYS, (), label="Keys", search="Search keys: name, role", unit="keys")
                sdk_line("keys = await service.list_keys()  # made and revoked by `gradwire keys`, on its machine")
            sdk_line("queues, used = await service.list_queues(), await service.usage(['owner'])")
        with ui.element("div"):
            with panel("This connection"):
                about = Drawn()
            engines = Drawn().classes("gw-stack")
            sdk_line("info = await service.server_info()")

    async def look() -> None:
        with told(failed):
            info, waiting, used = await workspace.server_info(), await workspace.queues(), await workspace.usage()
            queues.show(queue_rows(workspace, waiting))
            usage.show(usage_rows(workspace, info, used))
            runs.show(_run_rows(workspace, info))
            about.show(_about(info), facts)
            engines.show(info.engines, _engines)

    async def look_at_keys() -> None:
        with contextlib.suppress(gradwire.GradwireError):  # which look() shows
            found = key_rows(workspace, await workspace.keys())
            keys.show(found)
            all_keys.set_visibility(bool(found))

    await look()
    await look_at_keys()
    ui.timer(LOOK_S, look)
    ui.timer(KEYS_LOOK_S, look_at_keys)


def _about(info: gradwire.ServerInfo) -> dict[str, object]:
    return {
        "Key": info.key_name or "none is asked for",
        "Role": info.role,
        "Version": info.version,
        "Device": info.device,
        "Up": f"{info.uptime_s / 3600:.1f} h",
        "Durability": info.durability,
    }


def _engines(engines: Sequence[EngineInfo]) -> None:
    for engine in engines:
        _engine(engine)


def _engine(engine: EngineInfo) -> None:
    with panel(f"Engine {engine.number}"):
        state("connected" if engine.ready else "away", "" if engine.ready else "its process gives no sign of life")
        held = {part: engine.memory_by_owner.get(part, 0) for part in PARTS}
        total = sum(held.values()) or 1
        with ui.element("div").classes("gw-meter").props('role=img aria-label="Memory by what holds it"'):
            for number, (part, size) in enumerate(held.items(), 1):
                bar = ui.element("i").style(f"--c: var(--s{number}); width: {100 * size / total:.1f}%")
                bar.props["title"] = f"{part}: {size_of(size)}"
        with ui.element("div").classes("gw-legend quiet"):
            for number, (part, size) in enumerate(held.items(), 1):
                if size:
                    with ui.element("span").classes("gw-key").style(f"--c: var(--s{number})"):
                        plain(f"{part} {size_of(size)}")
        used, there = engine.device_memory_used_bytes, engine.device_memory_total_bytes
        facts(
            {
                "Device": engine.device,
                "Machine": engine.machine,
                "Busy": f"{engine.busy:.0%}",
                "Process": size_of(engine.memory_bytes),
                "Device memory": f"{size_of(used)} of {size_of(there)}" if there else "",
                "Runs": ", ".join(f"{held.runs} on the {place}" for place, held in engine.runs.items() if held.runs),
                "Restarts": engine.restarts or "",
                "Last sign": f"{engine.heartbeat_age_s:.1f} s ago" if engine.heartbeat_age_s >= 0 else "",
                "Models": ", ".join(engine.models),
            }
        )


def queue_rows(workspace: Workspace, waiting: Sequence[QueuedRun]) -> list[dict[str, Any]]:
    """Rows of the queues, the oldest first."""

    def name_of(each: QueuedRun) -> str:
        live = workspace.runs.get(each.run_id)
        return live.name if live is not None else each.name or each.run_id or "another key's run"

    rows = []
    for number, each in enumerate(sorted(waiting, key=lambda each: -each.oldest_s)):
        ahead = [other for other in waiting if other is not each and other.engine == each.engine and other.executing]
        row = {
            "key": each.run_id or f"other-{number}",
            "name": name_of(each),
            "owner": each.owner,
            "state": "parked" if each.parked else "running" if each.executing else "queued",
            "operation": each.operation,
            "executing": each.executing,
            "waiting": each.waiting,
            "bytes": size_of(each.bytes) if each.bytes else "",
            "oldest": f"{each.oldest_s:.1f} s",
            "behind": ", ".join(map(name_of, ahead)),
        }
        rows.append(row | ({"href": f"run/{each.run_id}/journal"} if each.run_id else {}))
    return rows


def usage_rows(workspace: Workspace, info: gradwire.ServerInfo, used: Sequence[gradwire.Usage]) -> list[dict[str, Any]]:
    """Tokens and seconds of each key in the last 30 days, the largest first, and its runs."""
    by_key = {each.owner: list[LiveRun]() for each in used}
    for run in workspace.runs.values():
        by_key.setdefault(run.info.owner, []).append(run)
    counted = {each.owner: each for each in used}
    total = sum(each.engine_s for each in used) or 1.0
    rows = []
    for owner, runs in by_key.items():
        each = counted.get(owner)
        tokens = each.training_tokens + each.prompt_tokens + each.sampled_tokens if each else 0
        engine_s = each.engine_s if each else 0.0
        rows.append(
            {
                "key": owner or "everyone",
                "runs": len(runs),
                "training": sum(run.state == "training" for run in runs) or "",
                "tokens": short(tokens),
                "seconds": f"{engine_s:.1f} s",
                "share": f"{engine_s / total:.0%}",
                "cost": cost_of(info, engine_s),
                "recovery": f"{sum(run.info.recovery_s for run in runs):.1f} s",
            }
        )
    return rows


def key_rows(workspace: Workspace, keys: Sequence[gradwire.KeyInfo]) -> list[dict[str, Any]]:
    """Rows of the keys, the newest first."""
    owned = Counter(run.info.owner for run in workspace.runs.values())
    return [
        {
            "key": each.name,
            "name": each.name,
            "role": each.role,
            "state": "revoked" if each.revoked_at else "valid",
            "runs": owned[each.name] or "",
            "quota": ", ".join(f"{name} {value:,}" for name, value in each.quota.items()),
            "age": ago(each.created_at),
        }
        for each in keys
    ]


def _run_columns() -> tuple[Column, ...]:
    return (Column("name", "Run", link=True), Column("owner", "Key", sparse=True), *USAGE[3:])


def _run_rows(workspace: Workspace, info: gradwire.ServerInfo) -> list[dict[str, Any]]:
    total = sum(run.info.engine_s for run in workspace.runs.values()) or 1.0
    used = sorted(workspace.runs.values(), key=lambda run: -run.info.engine_s)
    return [
        {
            "key": run.info.run_id,
            "href": f"run/{run.info.run_id}",
            "name": run.name,
            "owner": run.info.owner,
            "tokens": short(run.info.num_tokens),
            "seconds": f"{run.info.engine_s:.1f} s",
            "share": f"{run.info.engine_s / total:.0%}",
            "cost": cost_of(info, run.info.engine_s),
            "recovery": f"{run.info.recovery_s:.1f} s",
        }
        for run in used
        if run.info.engine_s
    ]
