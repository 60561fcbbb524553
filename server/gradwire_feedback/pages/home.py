"""`/`: the agents, and where to go from here."""

from __future__ import annotations

from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Table, empty, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.pages.session import AGENTS, framed, signed_in
from gradwire_feedback.store.agents import Agent, agents_of

COLUMNS = (
    Column("agent", "Agent", link=True),
    Column("waiting", "Answers to rate", num=True),
    Column("scores", "Scores", num=True),
    Column("versions", "Versions", num=True),
    Column("deployed", "Answers come from"),
)
EXAMPLE = """curl --fail -X POST {url}/api/policies/feedback/my_agent -H 'Content-Type: application/json' \\
  -d '{{"prompt": "Hello", "response": "Good morning.", "score": 0.9, "runId": "first"}}'"""


def register(context: Context) -> None:
    @page_at("/", title="Agents")
    async def home() -> RedirectResponse | None:
        caller = signed_in(context)
        if caller is None:
            return RedirectResponse("/login")
        may_read = caller.may("read")

        def load() -> list[Agent]:
            with context.database.read() as session:
                return agents_of(session)

        agents = await run_in_threadpool(load)
        with framed((AGENTS,), "/"):
            title("Agents")
            if not agents:
                empty("There is no agent yet. The first score, sent with its answer, makes one:")
                sdk_line(EXAMPLE.format(url=str(ui.context.client.request.base_url).rstrip("/")))
            else:
                _table(agents, may_read)
            with ui.element("p"):
                ui.link("The API and its documentation", "/docs").classes("gw-link")
        return None


def _table(agents: list[Agent], may_read: bool) -> None:
    """List the agents; a rater is led to the answers, and sees no results."""
    rows = [
        {
            "key": agent.name, "agent": agent.name, "waiting": agent.waiting, "scores": agent.scores,
            "versions": agent.versions, "href": f"/{'policies' if may_read else 'rate'}/{agent.name}",
            "deployed": ", ".join(f"{version} {share:.0%}" for version, share in agent.weights.items()),
        }
        for agent in agents
    ]  # fmt: skip
    shown = COLUMNS if may_read else COLUMNS[:2]
    Table(shown, rows, label="Agents", search="Search agents", unit="agents")
