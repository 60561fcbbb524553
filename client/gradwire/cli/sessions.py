"""``gradwire sessions``: what agents did in their rollout sessions."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from gradwire.cli.listing import minute, print_listing
from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.text import plain, precise, size
from gradwire.rollout import Branch, Rollout, Turn
from gradwire.sessions import SessionInfo

SHOWN = 200
"""Sessions that are listed."""
SHOWN_CHARS = 600
"""Characters shown of a message, unless all of it is asked for."""
SessionId = Annotated[str, typer.Argument(help="Id of the session, as `gradwire sessions list` shows it.")]

app = typer.Typer(help="List, show and end the rollout sessions of agents.", no_args_is_help=True)


@app.command("list")
@with_access
def list_sessions(
    access: Access,
    run: Annotated[str, typer.Option(help="Only those of this run.")] = "",
    group: Annotated[str, typer.Option(help="Only those of this group.")] = "",
    state: Annotated[Literal["open", "ended"] | None, typer.Option(help="Only those in this state.")] = None,
) -> None:
    """List the newest sessions of your key."""
    with connected(access) as service:
        found = service.sessions.list(run, group, state or "", SHOWN)
    columns = ("session", "name", "group", "model", "state", "turns", "prompt", "sampled", "size", "created", "owner")
    print_listing(columns, [_row(each) for each in found], empty=f"no sessions on {access.address}",
                  right=["turns", "prompt", "sampled", "size"])  # fmt: skip


@app.command()
@with_access
def show(
    access: Access,
    session_id: SessionId,
    whole: Annotated[bool, typer.Option("--whole", help="Show messages whole.")] = False,
) -> None:
    """Show the conversations that a session was, branch by branch."""
    with connected(access) as service:
        session = service.sessions.get(session_id)
        rollout = session.rollout()
    info, console = session.info, Console(soft_wrap=True)
    ended = f"ended: {info.end_reason}" if info.state == "ended" else "open"
    console.print(Text(plain(f"{info.session_id} of {info.model}, {ended}"), "bold"))
    console.print(
        f"{info.num_turns} turns, {info.num_prompt_tokens:,} prompt tokens, {info.num_sampled_tokens:,} sampled"
    )
    for number, branch in enumerate(rollout.branches):
        _show_branch(console, rollout, number, branch, None if whole else SHOWN_CHARS)


@app.command()
@with_access
def end(
    access: Access,
    session_ids: Annotated[list[str], typer.Argument(help="Ids of the sessions.", metavar="SESSION_ID...")],
    reason: Annotated[str, typer.Option(help="Why, for people.")] = "ended by its owner",
) -> None:
    """End sessions: their keys open nothing any more."""
    with connected(access) as service:
        for session_id in session_ids:
            info = service.sessions.get(session_id).end(reason)
            print(f"{session_id} has ended: {plain(info.end_reason)}")


def _row(info: SessionInfo) -> tuple[str, ...]:
    return (
        info.session_id, info.name, info.group, info.model, info.state, str(info.num_turns),
        f"{info.num_prompt_tokens:,}", f"{info.num_sampled_tokens:,}", size(info.size_bytes),
        minute(info.created_at), info.owner,
    )  # fmt: skip


def _show_branch(console: Console, rollout: Rollout, number: int, branch: Branch, most: int | None) -> None:
    kind = "main" if branch.main else "side call"
    left = f", leaves turn {branch.forked_from} ({branch.reason})" if branch.reason else ""
    trained = f"{int(branch.trained.sum()):,} of {len(branch.ids):,} tokens are trained on"
    console.print()
    console.print(Text(plain(f"branch {number}, {kind}{left}: {trained}"), "bold"))
    if branch.own and branch.own[0].system:
        _print(console, "system", branch.own[0].system, most)
    for turn in branch.own:
        for message in turn.messages:
            if message["role"] != "system":
                _print(console, str(message["role"]), message.get("content"), most)
        _print_turn(console, turn, rollout.turn_rewards.get(turn.number), most)


def _print_turn(console: Console, turn: Turn, reward: float | None, most: int | None) -> None:
    versions = sorted(set(turn.versions.tolist()))
    at = f"version {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "") if versions else ""
    facts = [f"turn {turn.number}", f"{len(turn.response_ids)} tokens", at, turn.finish_reason, precise(turn.seconds)]
    facts += ["unused"] * (not turn.used) + ([] if reward is None else [f"reward {reward:g}"])
    facts += [time.strftime("%H:%M:%S", time.localtime(turn.started_at))]
    console.print(Text(", ".join(filter(None, facts)), "dim"))
    if turn.reasoning:
        _print(console, "reasoning", turn.reasoning, most)
    if turn.text:
        _print(console, "assistant", turn.text, most)
    for call in turn.tool_calls:
        function = call["function"]
        _print(console, f"calls {function['name']}", function["arguments"], most)


def _print(console: Console, who: str, content: object, most: int | None) -> None:
    text = content if isinstance(content, str) else str(content)
    shown = text if most is None or len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    lines = "\n  ".join(plain(line) for line in shown.splitlines())
    console.print(Text.assemble((f"{plain(who)}: ", "cyan"), lines))
