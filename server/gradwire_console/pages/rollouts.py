"""`/run/{run_id}/rollouts`: recorded conversations with tool calls and rewards, a group side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Table, bars, empty, facts, panel, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import counted, later, opened_run, run_head
from gradwire_console.workspace import Workspace, Workspaces

GROUPS = (
    Column("name", "Group", link=True),
    Column("task", "Task"),
    Column("signal", "Signal", "none: all rewards of the group are equal, so it teaches nothing"),
    Column("count", "Answers", num=True),
    Column("cut", "Cut", "Answers that a limit ended, as max_tokens", num=True, sparse=True),
    Column("mean", "Mean reward", num=True),
    Column("std", "Deviation", num=True),
    Column("low", "Lowest", num=True),
    Column("high", "Highest", num=True),
)
BINS = 12
SHADES = ((-0.7, ""), (-2.3, "background: color-mix(in srgb, var(--s2) 18%, transparent)"),
          (-1e9, "background: color-mix(in srgb, var(--s2) 38%, transparent)"))  # fmt: skip
"""Background of a token by its log-probability, the least first that it reaches."""
EXAMPLE = "GRPOAlgorithm(service, run, tasks, reward, recorder=RunRecorder(run, every=10))"
Rollout = Mapping[str, Any]


def register(workspaces: Workspaces) -> None:
    @page_at("/run/{run_id}/rollouts", title="Rollouts · gradwire")
    async def rollouts(run_id: str, n: int = -1, group: str = "") -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            run_head(workspace, run_id, "/rollouts")
            later(lambda: _show(workspace, run_id, n, group))

        return await opened_run(workspaces, run_id, f"/rollouts?n={n}&group={group}", content)


async def _show(workspace: Workspace, run_id: str, asked: int, group: str) -> None:
    run = workspace.client(run_id)
    there = [each.number for each in await run.list_recordings() if each.kind == "rollouts"]
    if not there:
        empty("No rollouts of this run are recorded. A training in Python records them:", EXAMPLE)
        return
    iteration = asked if asked in there else there[-1]
    groups = grouped(await run.recorded_rollouts(iteration))
    with ui.element("div").classes("gw-head"):
        ui.select(
            {number: f"iteration {number}" for number in reversed(there)}, value=iteration, label="Rollouts of",
            on_change=lambda event: ui.navigate.to(f"/run/{run_id}/rollouts?n={event.value}"),
        ).props("outlined dense options-dense").style("min-width: 10rem")  # fmt: skip
        silent = sum(not signal(rewards(each)) for each in groups.values())
        plain(f"{counted(len(groups), 'group')}, {silent} without signal", "gw-flag" if silent else "quiet")
    rows = [_row(run_id, iteration, name, each) for name, each in groups.items()]
    Table(GROUPS, rows, label="Groups", search="Search groups: task", unit="groups")
    telling = (name for name, each in groups.items() if signal(rewards(each)))
    shown = group if group in groups else next(telling, next(iter(groups)))
    _group(shown, groups[shown])
    sdk_line(f'await service.get_training_client("{run_id}").recorded_rollouts({iteration})')


def grouped(records: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts by the name of their group, in order."""
    groups: dict[str, list[Rollout]] = {}
    for record in records:
        groups.setdefault(str(record.get("group", "")), []).append(record)
    return groups


def rewards(group: Sequence[Rollout]) -> list[float]:
    return [float(each["reward"]) for each in group if isinstance(each.get("reward"), int | float)]


def signal(values: Sequence[float]) -> bool:
    """Whether rewards differ, so that the group teaches something."""
    return len(set(values)) > 1


def ending(rollout: Rollout) -> str:
    """How an answer ended: its status, or which limit cut it."""
    steps, status = rollout.get("steps") or [{}], str(rollout.get("status", ""))
    if status in ("completed", "") and steps[-1].get("stop_reason") == "length":
        return "cut: its last turn reached max_tokens"
    return "cut by a limit of the rollout" if status == "truncated" else status


def _row(run_id: str, iteration: int, name: str, group: Sequence[Rollout]) -> dict[str, Any]:
    values = np.array(rewards(group) or [np.nan])
    task = " ".join((common_prompt(group) or str(group[0].get("task", ""))).split())
    return {
        "key": name,
        "href": f"rollouts?n={iteration}&group={quote(name, safe='')}",
        "name": f"group {name}",
        "task": task[:90],
        "task_hint": task,
        "signal": "yes" if signal(rewards(group)) else "none",
        "count": len(group),
        "cut": sum(ending(each).startswith("cut") for each in group) or "",
        "mean": f"{values.mean():.4g}",
        "std": f"{values.std():.3g}" if signal(rewards(group)) else "0",
        "low": f"{values.min():.4g}",
        "high": f"{values.max():.4g}",
    }


def _group(name: str, group: Sequence[Rollout]) -> None:
    values = rewards(group)
    prompt = common_prompt(group)
    with panel(f"Group {name}"):
        if prompt:
            turn_shown("asked, all of them", prompt, "")
        else:
            plain(str(group[0].get("task", "")), "text")
        if not signal(values):
            plain("All rewards are equal: this group gives no gradient.", "gw-flag")
        elif values:
            counts, edges = np.histogram(values, BINS)
            plain(f"Rewards of the {counted(len(values), 'answer')}", "quiet")
            bars(counts.tolist(), edges.tolist(), f"Histogram of {counted(len(values), 'reward')}")
    with ui.element("div").classes("gw-answers"):
        for each in group:
            _rollout(each, prompt)


def common_prompt(group: Sequence[Rollout]) -> str:
    """The first observation that all answers of a group share; "" where they differ."""
    asked = {str((each.get("steps") or [{}])[0].get("observation", "")) for each in group}
    return asked.pop() if len(asked) == 1 else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _rollout(rollout: Rollout, prompt: str) -> None:
    reward = _number(rollout.get("reward"))
    with panel():
        with ui.element("div").classes("gw-head"):
            title(f"Answer {rollout.get('member', '')}", 2)
            ui.element("div").classes("grow")
            plain("" if reward is None else f"reward {reward:.4g}", "mono")
        facts(
            {
                "Why": rollout.get("reason", ""),
                "Status": ending(rollout),
                "Error": rollout.get("error", ""),
                **{name: f"{value:.4g}" for name, value in _numbers(rollout.get("metrics")).items()},
            }
        )
        for number, step in enumerate(rollout.get("steps", ())):
            _step(step, "" if number == 0 and prompt else str(step.get("observation", "")))


def _step(step: Mapping[str, Any], asked: str) -> None:
    turn_shown("asked", asked, "")
    with ui.element("div").classes("gw-turn answer"):
        figures = _numbers(
            {"reward": step.get("reward"), "advantage": step.get("advantage"), "value": step.get("value")}
        )
        plain("answered · " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()), "quiet")
        with ui.element("div").classes("text"):
            tokens = step.get("tokens")
            if tokens:
                tokens_shown(tokens)
            else:
                plain(str(step.get("action", "")))
    for result in step.get("tool_results", ()):
        called = f"{result.get('name', '')}({json.dumps(result.get('arguments', {}))})"
        turn_shown(f"tool {called}", str(result.get("error") or result.get("content", "")), "tool")


def tokens_shown(tokens: Iterable[tuple[str, float]]) -> None:
    """Tokens one after another, the darker the less probable they were."""
    for text, logprob in tokens:
        shown = plain(str(text), tag="span").style(next(style for least, style in SHADES if logprob >= least))
        shown.props["title"] = f"log-probability {logprob:.3f}"


def turn_shown(who: str, text: str, kind: str) -> None:
    """Show one turn of a conversation."""
    if text:
        with ui.element("div").classes(f"gw-turn {kind}"):
            plain(who, "quiet")
            plain(text, tag="pre").props("tabindex=0")


def _numbers(values: Any) -> dict[str, float]:
    given = values if isinstance(values, Mapping) else {}
    return {str(name): float(value) for name, value in given.items() if isinstance(value, int | float)}
