"""`/sessions`: rollout sessions of agents, each as the conversations that it was, branch by branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradwire
from fastapi.responses import RedirectResponse
from gradwire.rollout import Branch, Rollout, Turn
from gradwire_shell.components import Column, Table, button, empty, error, facts, panel, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.pages.common import FAILURES, act, ago, ask, counted, later, opened, size_of, told
from gradwire_console.pages.rollouts import tokens_shown, turn_shown
from gradwire_console.workspace import Workspace, Workspaces

COLUMNS = (
    Column("name", "Session", link=True),
    Column("state", "State", "running: its agent may still call", state=True),
    Column("belongs", "Group", sparse=True),
    Column("model", "Model"),
    Column("turns", "Turns", "Answered calls", num=True),
    Column("sampled", "Sampled", "Sampled tokens", num=True),
    Column("reward", "Reward", num=True),
    Column("size", "Size", num=True),
    Column("owner", "Owner", sparse=True),
    Column("age", "Age", num=True),
    Column("reason", "Ended", sparse=True),
)
MOST = 500
LOOK_S = 2.0
SHOWN_TOKENS = 8000
"""Tokens of a session that are shown one by one, with their log-probabilities; the text of those behind them is."""
DECODED = 1000


def register(workspaces: Workspaces) -> None:
    @page_at("/sessions", title="Sessions · gradwire")
    async def sessions() -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            await _list(workspace)

        return await opened(workspaces, "/sessions", "/sessions", content)

    @page_at("/sessions/{session_id}", title="Session · gradwire")
    async def session(session_id: str) -> RedirectResponse | None:
        async def content(workspace: Workspace) -> None:
            later(lambda: _show(workspaces, workspace, session_id))

        return await opened(workspaces, f"/sessions/{session_id}", "/sessions", content)


async def _list(workspace: Workspace) -> None:
    title("Sessions")
    failed, none = ui.element("div"), ui.element("div")
    with none:
        empty(
            "No rollout session yet. A session is a base URL for an agent, and the record of what it did there.",
            "session = await run.rollout_session(task=…)",
        )
    table = Table(
        COLUMNS, (), label="Sessions", search="Search sessions: name, group, model", unit="sessions", instead=none
    )
    sdk_line("await service.sessions.list()")

    async def look() -> None:
        with told(failed):
            table.show([_row(each) for each in await workspace.sessions(MOST)])

    await look()
    ui.timer(LOOK_S, look)


def _row(info: gradwire.SessionInfo) -> dict[str, Any]:
    return {
        "key": info.session_id,
        "href": f"sessions/{info.session_id}",
        "name": info.name or info.session_id,
        "state": "running" if info.state == "open" else "valid",
        "belongs": info.group,
        "model": info.model,
        "turns": info.num_turns,
        "sampled": f"{info.num_sampled_tokens:,}",
        "reward": "" if info.reward is None else f"{info.reward:.4g}",
        "size": size_of(info.size_bytes),
        "owner": info.owner,
        "age": ago(info.created_at),
        "reason": info.end_reason,
    }


async def _show(workspaces: Workspaces, workspace: Workspace, session_id: str) -> None:
    try:
        session = await workspace.service.sessions.get(session_id)
        rollout = await session.rollout()
    except FAILURES as failure:
        title("There is no such session")
        error(str(failure))
        return
    info = session.info
    with ui.element("div").classes("gw-head"):
        title(info.name or info.session_id)
        ui.element("div").classes("grow")
        if info.state == "open" and workspace.may_change(info.owner):
            button("End", lambda: _end(workspaces, session), kind="danger")
    facts(
        {
            "Session": info.session_id,
            "Model": info.model,
            "Group": info.group,
            "Task": info.task,
            "State": "open" if info.state == "open" else f"ended: {info.end_reason}",
            "Reward": "" if info.reward is None else f"{info.reward:.4g}",
            "History": info.history,
            "Tokens": f"{info.num_prompt_tokens:,} of prompts, {info.num_sampled_tokens:,} sampled",
            "Size": size_of(info.size_bytes),
        }
    )
    if not rollout.turns:
        empty("Its agent has not called yet.", f'session = await service.sessions.get("{session_id}")')
        return
    texts = await _texts(workspace, info.base_model, rollout.turns)
    for number, branch in enumerate(rollout.branches):
        _branch(number, branch, rollout, texts)
    sdk_line(f'rollout = await (await service.sessions.get("{session_id}")).rollout()')


def _end(workspaces: Workspaces, session: gradwire.RolloutSession) -> None:
    async def do() -> None:
        if await act(workspaces, lambda: session.end("ended in the console"), "Ended."):
            ui.navigate.reload()

    ask(
        "End the session", "Its agent's calls are refused from now on; what it did stays.",
        'await session.end("…")', "End", do,
    )  # fmt: skip


async def _texts(workspace: Workspace, model: str, turns: Sequence[Turn]) -> dict[int, list[tuple[str, float]]]:
    """The sampled tokens of the first turns as texts with their log-probabilities, by number of the turn."""
    shown, left = list[Turn](), SHOWN_TOKENS
    for turn in turns:
        if (left := left - len(turn.response_ids)) < 0:
            break
        shown.append(turn)
    ids = [[int(token)] for turn in shown for token in turn.response_ids]
    texts: list[str] = []
    for start in range(0, len(ids), DECODED):
        texts += await workspace.service.decode(model, ids[start : start + DECODED])
    found, at = dict[int, list[tuple[str, float]]](), 0
    for turn in shown:
        end = at + len(turn.response_ids)
        found[turn.number] = list(zip(texts[at:end], map(float, turn.logprobs), strict=True))
        at = end
    return found


def _branch(number: int, branch: Branch, rollout: Rollout, texts: dict[int, list[tuple[str, float]]]) -> None:
    with panel(f"Branch {number}"):
        facts(
            {
                "Kind": "main" if branch.main else "side call: not trained on",
                "Begins": f"leaves turn {branch.forked_from}: {branch.reason}" if branch.reason else "",
                "Tokens": f"{len(branch.ids):,}, of which {int(branch.trained.sum()):,} are trained on",
                "Tools": ", ".join(branch.tool_names),
            }
        )
        if branch.own and branch.own[0].system:
            turn_shown("system", branch.own[0].system, "")
        for turn in branch.own:
            for message in turn.messages:
                if message.get("role") != "system":
                    kind = "tool" if message.get("role") == "tool" else ""
                    turn_shown(str(message.get("role", "")), _text(message.get("content")), kind)
            _turn(turn, rollout.turn_rewards.get(turn.number), texts.get(turn.number, ()))


def _turn(turn: Turn, reward: float | None, tokens: Sequence[tuple[str, float]]) -> None:
    versions = sorted(set(turn.versions.tolist()))
    by = " to ".join(str(each) for each in dict.fromkeys((versions[0], versions[-1]))) if versions else ""
    figures = [f"turn {turn.number}", counted(len(turn.response_ids), "token"), f"version {by}", turn.finish_reason]
    figures += [f"{turn.seconds:.1f} s", turn.door]
    figures += ["unused"] * (not turn.used) + ([] if reward is None else [f"reward {reward:.3g}"])
    with ui.element("div").classes("gw-turn answer"):
        plain("answered · " + ", ".join(figures), "quiet")
        with ui.element("div").classes("text"):
            if tokens:
                tokens_shown(tokens)
            else:
                plain("\n".join(filter(None, (turn.reasoning, turn.text))))
    if not tokens:
        for call in turn.tool_calls:
            turn_shown(f"calls {call['function']['name']}", str(call["function"]["arguments"]), "tool")


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts if isinstance(part, dict))
