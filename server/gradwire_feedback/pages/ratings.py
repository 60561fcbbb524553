"""`/ratings/{agent_id}`: stored ratings, each with a way to correct or withdraw it; a rater sees their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import button, empty, named, panel, plain, title
from nicegui import ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.pages.session import ask_name, entrance, rater_of, shell, signed_in
from gradwire_feedback.store import rankings, ratings
from gradwire_feedback.store.problems import ProblemError
from gradwire_feedback.store.rankings import Ranked
from gradwire_feedback.store.ratings import Rating

PAGE_ROWS = 30


def register(context: Context) -> None:
    @ui.page("/ratings/{agent_id}", title="Ratings")
    async def show(agent_id: str) -> RedirectResponse | None:
        caller = entrance(context, "rate", agent_id, f"/ratings/{agent_id}")
        if caller is None or isinstance(caller, RedirectResponse):
            return caller
        with shell(agent_id, "ratings"):
            person = rater_of(caller)
            if person is None:
                ask_name()
            else:
                await _Ratings(context, agent_id, person, caller.may("train")).show()
        return None


class _Ratings:
    def __init__(self, context: Context, agent_id: str, person: str, everyones: bool) -> None:
        self._context, self._agent_id, self._person, self._everyones = context, agent_id, person, everyones
        self._found: list[Rating] = []
        self._rankings: list[Ranked] = []
        self._before: int | None = None

    async def show(self) -> None:
        title(f"Ratings of {self._agent_id}" if self._everyones else f"Your ratings of {self._agent_id}")
        await self._load()
        self._rows()

    async def _load(self) -> None:
        def load() -> tuple[list[Rating], list[Ranked]]:
            with self._context.database.read() as session:
                rater = None if self._everyones else self._person
                page: dict[str, Any] = {"rater": rater, "before": self._before, "limit": PAGE_ROWS}
                return (
                    ratings.ratings_of(session, self._agent_id, **page),
                    rankings.rankings_of(session, self._agent_id, **page),
                )

        self._found, self._rankings = await run_in_threadpool(load)

    @ui.refreshable_method
    def _rows(self) -> None:
        if not self._found and not self._rankings:
            empty("There are no ratings here yet." if self._before is None else "There are no older ratings.")
        for rating in self._found:
            self._row(rating)
        if self._rankings:
            title("Rankings", 2)
        for ranking in self._rankings:
            self._ranking(ranking)
        with ui.row():
            if self._before is not None:
                button("Newest", lambda: self._page(None))
            full = [self._found[-1].feedback.number] if len(self._found) == PAGE_ROWS else []
            full += [self._rankings[-1].ranking.number] if len(self._rankings) == PAGE_ROWS else []
            if full:
                button("Older", lambda: self._page(max(full)))

    def _ranking(self, found: Ranked) -> None:
        row = found.ranking
        with panel().mark("ranking"):
            ui.label(found.prompt).classes("quiet text gw-scroll").props("tabindex=0")
            for rank, response in zip(found.ranks, found.responses):
                ui.label(f"{rank}. {response or '(empty)'}").classes("text gw-scroll").props("tabindex=0")
            words = [f"by {row.rater}" if row.rater else "by a program"]
            words += [f"note: {row.notes}"] if row.notes else []
            plain(("Withdrawn: " if row.withdrawn is not None else "") + ", ".join(words))
            if row.withdrawn is None:
                with ui.row():
                    button("Withdraw", lambda: self._withdraw_ranking(row.id), kind="danger")

    def _row(self, rating: Rating) -> None:
        row = rating.feedback
        with panel().mark("rating"):
            ui.label(row.prompt).classes("quiet text gw-scroll").props("tabindex=0")
            ui.label(row.response or "(empty)").classes("text gw-scroll").props("tabindex=0")
            words = [f"score {row.score:g}", f"by {row.rater}" if row.rater else "by a program"]
            words += [f"of {row.version}"] if row.version and self._everyones else []
            words += [f"note: {row.notes}"] if row.notes else []
            plain(("Withdrawn: " if row.withdrawn else "") + ", ".join(words))
            for change in rating.history:
                plain(
                    f"{change.created_at:%Y-%m-%d %H:%M} {change.change} by {change.by}; it was {change.score:g}",
                    "quiet",
                )
            if rating.versions and self._everyones:
                plain(
                    f"Trained on it: {', '.join(rating.versions)}. A change does not reach these; train again.", "quiet"
                )
            if not row.withdrawn:
                with ui.row().classes("items-center"):
                    score = named(ui.number(value=row.score, min=0, max=1, step=0.25), "Score").style("width: 6rem")
                    button("Correct", lambda: self._correct(row.id, score.value))
                    button("Withdraw", lambda: self._withdraw(row.id), kind="danger")

    async def _page(self, before: int | None) -> None:
        self._before = before
        await self._load()
        self._rows.refresh()

    async def _correct(self, rating_id: str, score: float | None) -> None:
        if score is None or not 0 <= score <= 1:
            ui.notify("A score is a number from 0 to 1.", type="warning")
            return

        def store(session: Any) -> None:
            ratings.correct(
                session, self._agent_id, rating_id, self._person, float(score), None, own=not self._everyones
            )

        await self._carry_out(store, "Corrected.")

    async def _withdraw(self, rating_id: str) -> None:
        def store(session: Any) -> None:
            ratings.withdraw(session, self._agent_id, rating_id, self._person, own=not self._everyones)

        await self._carry_out(store, "Withdrawn.")

    async def _withdraw_ranking(self, ranking_id: str) -> None:
        def store(session: Any) -> None:
            rankings.withdraw_ranking(session, self._agent_id, ranking_id, self._person, own=not self._everyones)

        await self._carry_out(store, "Withdrawn.")

    async def _carry_out(self, store: Callable[[Any], None], done: str) -> None:
        caller = signed_in(self._context)
        if caller is None or not caller.may("train" if self._everyones else "rate"):
            ui.navigate.to(f"/login?next=/ratings/{self._agent_id}")
            return

        def write() -> None:
            with self._context.database.write() as session:
                store(session)

        try:
            await run_in_threadpool(write)
            ui.notify(done)
        except ProblemError as error:
            ui.notify(str(error), type="warning")
        await self._load()
        self._rows.refresh()
