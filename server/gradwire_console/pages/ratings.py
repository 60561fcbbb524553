"""`/ratings`: what people said of checkpoints, versions and models in the feedback service beside the console."""

from __future__ import annotations

from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Table, empty, error, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui

from gradwire_console.feedback import Rated
from gradwire_console.pages.common import isolated, opened
from gradwire_console.workspace import Workspace, Workspaces

COLUMNS = (
    Column("name", "Answers of", "A checkpoint or a model, from the playground, or a trained version", link=True),
    Column("agent", "Agent", "The name under which the feedback service collects"),
    Column("mean", "Score", "Mean of people's scores, from 0 (bad) to 1 (excellent)", num=True, sparse=True),
    Column("scores", "Scores", "Number of scores", num=True, sparse=True),
    Column("won", "Won", "Of the comparisons with another source's answer to the same prompt", num=True, sparse=True),
    Column("compared", "Compared", "Number of these comparisons, ties among them", num=True, sparse=True),
    Column("deployed", "Deployed", "Share of the users that get its answers", num=True, sparse=True),
)
LOOK_S = 5.0


def register(workspaces: Workspaces) -> None:
    @page_at("/ratings", title="Ratings · gradwire")
    async def ratings() -> RedirectResponse | None:
        return await opened(workspaces, "/ratings", "/ratings", lambda workspace: _show(workspaces, workspace))


def readable(workspace: Workspace, found: list[Rated]) -> list[Rated]:
    """The ratings that a key may see: without checkpoints of runs that it may not read."""
    return [each for each in found if "/" not in each.source or each.source.partition("/")[0] in workspace.runs]


async def _show(workspaces: Workspaces, workspace: Workspace) -> None:
    feedback = workspaces.feedback
    with ui.element("div").classes("gw-head"):
        title("Ratings")
        plain("what people said of answers", "quiet")
        ui.element("div").classes("grow")
        if feedback is not None:
            ui.link("Feedback service", feedback.url, new_tab=True).classes("gw-link")
    if feedback is None:
        empty(
            "No feedback service is beside this console. Start one, and the console with its address:",
            "gradwire console --feedback http://127.0.0.1:8000",
        )
        return
    failed, none = ui.element("div"), ui.element("div")
    with none:
        empty("No rating yet. The playground's link “Rate these answers” asks people, and so does a deployed version.")
    table = Table(
        COLUMNS, (), label="Ratings", search="Search ratings: checkpoint, run, agent", unit="sources", instead=none
    )
    sdk_line(f'httpx.get("{feedback.url}/api/policies").json()')

    async def look() -> None:
        failed.clear()
        try:
            ratings = readable(workspace, await feedback.ratings())
        except OSError as failure:
            with failed:
                error(str(failure))
            none.set_visibility(False)
            return
        table.show([_row(workspace, each) for each in ratings])

    await look()
    ui.timer(LOOK_S, look)


def _row(workspace: Workspace, each: Rated) -> dict[str, Any]:
    run_id, _, checkpoint = each.source.partition("/")
    live = workspace.runs.get(run_id)
    compared = each.wins + each.ties + each.losses
    row = {
        "key": f"{each.agent} {each.source}",
        "name": f"{isolated(live.name)}, {checkpoint}" if live is not None else each.source or "answers from elsewhere",
        "name_hint": each.source,
        "agent": each.agent,
        "mean": "" if each.mean is None else f"{each.mean:.3f}",
        "scores": each.scores or "",
        "won": f"{each.wins / compared:.0%}" if compared else "",
        "compared": compared or "",
        "deployed": f"{each.weight:.0%}" if each.weight else "",
    }
    return row | ({"href": f"run/{run_id}/checkpoints"} if live is not None else {})
