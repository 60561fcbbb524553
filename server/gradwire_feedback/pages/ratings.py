"""`/ratings/{agent_id}`: stored ratings, each with a way to correct or withdraw it; a rater sees their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import Lines, button, empty, named, panel, title
from gradwire_shell.frame import page_at
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
    @page_at("/ratings/{agent_id}", title="Ratings")
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
    """The page; a correction or withdrawal changes what is shown in place, and other rows come with another page."""

    def __init__(self, context: Context, agent_id: str, person: str, everyones: bool) -> None:
        self._context, self._agent_id, self._person, self._everyones = context, agent_id, person, everyones
        self._rows: list[_Row] = []

    async def show(self) -> None:
        title(f"Ratings of {self._agent_id}" if self._everyones else f"Your ratings of {self._agent_id}")
        self._empty = ui.element("div")
        self._list = ui.column().classes("full-width")
        with ui.row():
            self._newest = button("Newest", lambda: self._page(None))
            self._older = button("Older", lambda: self._page(self._rows[-1].number))
        await self._page(None)

    async def _page(self, before: int | None) -> None:
        """Show the ratings and rankings before this number, newest first."""
        ratings = await self._load(before)
        self._empty.clear()
        self._list.clear()
        if not ratings:
            with self._empty:
                empty("There are no ratings here yet." if before is None else "There are no older ratings.")
        with self._list:
            self._rows = [self._row(each) for each in ratings]
        self._newest.set_visibility(before is not None)
        self._older.set_visibility(len(ratings) == PAGE_ROWS)

    async def _load(self, before: int | None) -> list[Rating | Ranked]:
        def load() -> list[Rating | Ranked]:
            with self._context.database.read() as session:
                rater = None if self._everyones else self._person
                page: dict[str, Any] = {"rater": rater, "before": before, "limit": PAGE_ROWS}
                graded = ratings.ratings_of(session, self._agent_id, **page)
                ranked = rankings.rankings_of(session, self._agent_id, **page)
            found: list[Rating | Ranked] = [*graded, *ranked]
            return sorted(found, key=_number, reverse=True)[:PAGE_ROWS]

        return await run_in_threadpool(load)

    def _row(self, entry: Rating | Ranked) -> _Row:
        if isinstance(entry, Ranked):
            row_id = entry.ranking.id
            return _RankingRow(entry, lambda: self._withdraw_ranking(row_id))
        rating_id = entry.feedback.id
        return _RatingRow(
            entry, self._everyones, lambda score: self._correct(rating_id, score), lambda: self._withdraw(rating_id)
        )

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
        if self._rows:
            for row, found in zip(self._rows, await self._load(self._rows[0].number + 1), strict=True):
                row.show(found)


class _RatingRow:
    """A stored rating with fields to correct it and a button to withdraw it.

    Args:
        everyones: Whether whoever looks may know the versions.
        correct: Called with the typed score.
    """

    def __init__(
        self,
        rating: Rating,
        everyones: bool,
        correct: Callable[[float | None], Awaitable[None]],
        withdraw: Callable[[], Awaitable[None]],
    ) -> None:
        self.number, self._everyones, self._placed = rating.feedback.number, everyones, rating.feedback.score
        with panel():
            ui.label(rating.feedback.prompt).classes("quiet text gw-scroll").props("tabindex=0")
            ui.label(rating.feedback.response or "(empty)").classes("text gw-scroll").props("tabindex=0")
            self._summary = ui.label()
            self._history = Lines(classes="quiet")
            with ui.row().classes("items-center") as self._actions:
                self._score = named(ui.number(value=self._placed, min=0, max=1, step=0.25), "Score").style(
                    "width: 6rem"
                )
                button("Correct", lambda: correct(self._score.value))
                button("Withdraw", withdraw, kind="danger")
        self.show(rating)

    def show(self, rating: Rating | Ranked) -> None:
        """Show what became of the rating; a score that somebody typed stays."""
        assert isinstance(rating, Rating)
        row = rating.feedback
        words = [f"score {row.score:g}", f"by {row.rater}" if row.rater else "by a program"]
        words += [f"of {row.version}"] if row.version and self._everyones else []
        words += [f"note: {row.notes}"] if row.notes else []
        self._summary.text = ("Withdrawn: " if row.withdrawn else "") + ", ".join(words)
        lines = [
            f"{change.created_at:%Y-%m-%d %H:%M} {change.change} by {change.by}; it was {change.score:g}"
            for change in rating.history
        ]
        if rating.versions and self._everyones:
            lines.append(f"Trained on it: {', '.join(rating.versions)}. A change does not reach these; train again.")
        self._history.show(lines)
        if self._score.value == self._placed:
            self._score.value = row.score
        self._placed = row.score
        self._actions.set_visibility(not row.withdrawn)


class _RankingRow:
    """A stored ranking with a button to withdraw it."""

    def __init__(self, ranking: Ranked, withdraw: Callable[[], Awaitable[None]]) -> None:
        self.number = ranking.ranking.number
        with panel():
            ui.label(ranking.prompt).classes("quiet text gw-scroll").props("tabindex=0")
            for rank, response in zip(ranking.ranks, ranking.responses):
                ui.label(f"{rank}. {response or '(empty)'}").classes("text gw-scroll").props("tabindex=0")
            self._summary = ui.label()
            with ui.row() as self._actions:
                button("Withdraw", withdraw, kind="danger")
        self.show(ranking)

    def show(self, ranking: Rating | Ranked) -> None:
        """Show what became of the ranking."""
        assert isinstance(ranking, Ranked)
        row = ranking.ranking
        words = [f"by {row.rater}" if row.rater else "by a program"]
        words += [f"note: {row.notes}"] if row.notes else []
        self._summary.text = ("Withdrawn: " if row.withdrawn is not None else "") + ", ".join(words)
        self._actions.set_visibility(row.withdrawn is None)


_Row = _RatingRow | _RankingRow


def _number(found: Rating | Ranked) -> int:
    return found.ranking.number if isinstance(found, Ranked) else found.feedback.number
