"""`/offer`: answers that another page hands over, behind the ``#`` of this page's address, for people to rate.

What stands there is the body of ``POST /api/policies/items/AGENT`` as JSON, percent-encoded. Browsers send it to no
server, and nothing is stored before somebody who may says so here.
"""

from __future__ import annotations

import random

from fastapi.responses import RedirectResponse
from gradwire_shell.components import button, empty, error, panel, plain, title
from gradwire_shell.frame import page_at
from nicegui import ui
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.api.errors import fields_of, sentence
from gradwire_feedback.api.feedback import store_item
from gradwire_feedback.api.schemas import AnswerIn, ItemIn
from gradwire_feedback.context import Context
from gradwire_feedback.names import is_agent_id
from gradwire_feedback.pages.session import AGENTS, framed, signed_in
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store.agents import agents_of
from gradwire_feedback.store.problems import ProblemError

HANDED_OVER = "(() => { try { return decodeURIComponent(location.hash.slice(1)) } catch { return '' } })()"
ASKS = {"ranking": "which is better", "grades": "a grade of each"}
PATIENCE_S = 30.0


def register(context: Context) -> None:
    @page_at("/offer", title="Rate these answers")
    async def offer() -> RedirectResponse | None:
        caller = signed_in(context)
        if caller is None:
            return RedirectResponse("/login?next=/offer")
        with framed((AGENTS,), "/offer"):
            title("Rate these answers")
            if caller.may("train"):
                body = ui.element("div").classes("gw-lines")
                await ui.context.client.connected(timeout=PATIENCE_S)
                with body:
                    await _show(context)
            else:
                error(f"The key {caller.name} has the role {caller.role}; this page needs train.")
        return None


async def _show(context: Context) -> None:
    handed_over = await ui.run_javascript(HANDED_OVER, timeout=PATIENCE_S)
    if not handed_over:
        empty("Nothing was handed over. The console's playground does that, with its link “Rate these answers”.")
        return
    try:
        item = ItemIn.model_validate_json(handed_over)
    except ValidationError as wrong:
        error(f"What was handed over cannot be rated: {sentence(fields_of(wrong.errors()))}")
        return

    def names() -> list[str]:
        with context.database.read() as session:
            return [agent.name for agent in agents_of(session)]

    agents = await run_in_threadpool(names)
    asks = {ask: words for ask, words in ASKS.items() if item.others or ask == "grades"}
    with panel("Prompt"):
        plain(item.prompt, "text gw-scroll").props("tabindex=0")
    with ui.element("div").classes("gw-answers"):
        for number, answer in enumerate(_answers(item), 1):
            with panel(f"Answer {number}"):
                plain(answer.response or "(empty)", "text gw-scroll").props("tabindex=0")
    with ui.row().classes("items-center"):
        agent = ui.input("Agent", value=agents[0] if len(agents) == 1 else "", autocomplete=agents)
        ask = ui.select(asks, value=next(iter(asks)), label="Ask for").style("width: 10rem")
        raters = ui.number("People", value=1, min=1, max=LIMITS.raters_per_item, precision=0).style("width: 6rem")

    async def store() -> None:
        name, people = (agent.value or "").strip(), int(raters.value or 1)
        chosen = {"ask": ask.value, "raters": min(max(people, 1), LIMITS.raters_per_item)}
        caller = signed_in(context)
        if caller is None or not caller.may("train"):
            ui.navigate.to("/login?next=/offer")
        elif not is_agent_id(name):
            ui.notify("Name the agent: letters, digits, '.', '_' and '-'.", type="warning")
        else:
            try:
                await run_in_threadpool(_store, context, name, item.model_copy(update=chosen))
            except ProblemError as problem:
                ui.notify(str(problem), type="negative")
            else:
                ui.navigate.to(f"/rate/{name}")

    button("Ask people", store, kind="primary")


def _store(context: Context, agent_id: str, item: ItemIn) -> None:
    """Put the answers in the queue, in an order that does not tell the models."""
    first, *others = random.sample(_answers(item), 1 + len(item.others))
    mixed = item.model_copy(update={"response": first.response, "run_id": first.run_id, "others": others})
    with context.database.write() as session:
        store_item(session, agent_id, mixed)


def _answers(item: ItemIn) -> list[AnswerIn]:
    return [AnswerIn(response=item.response, run_id=item.run_id), *item.others]
