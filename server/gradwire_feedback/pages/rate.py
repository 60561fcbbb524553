"""`/rate/{agent_id}`: one item after the other, graded or ranked, blind to versions and others' scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi.responses import RedirectResponse
from gradwire_shell.components import button, named, panel, plain, title
from nicegui import events, ui
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.database.tables import Item
from gradwire_feedback.pages.session import ask_name, entrance, rater_of, shell, signed_in
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store import rating
from gradwire_feedback.store.problems import ConflictError

GRADES = {"1": ("Poor", 0.0), "2": ("Weak", 0.25), "3": ("Fair", 0.5), "4": ("Good", 0.75), "5": ("Excellent", 1.0)}
GRADE_OF = {score: key for key, (_, score) in GRADES.items()}
LETTERS = "ABCDEF"
COMMON_KEYS = {"Enter": "next", "S": "skip", "U": "undo", "N": "note"}
KEYS = {"1 to 5": "rate", "← →": "choose the answer"} | COMMON_KEYS
RANKING_KEYS = {"1, 2, …": "the best answer, then the next", "0": "equally good", "C": "clear"} | COMMON_KEYS


def register(context: Context) -> None:
    @ui.page("/rate/{agent_id}", title="Rate answers")
    async def rate(agent_id: str) -> RedirectResponse | None:
        caller = entrance(context, "rate", agent_id, f"/rate/{agent_id}")
        if caller is None or isinstance(caller, RedirectResponse):
            return caller
        with shell(agent_id, "rate", KEYS):
            rater = rater_of(caller)
            if rater is None:
                ask_name()
            else:
                await _Rating(context, agent_id, rater).show()
        return None


@dataclass
class _State:
    """The rater's input for the current item."""

    item: Item | None = None
    waiting: int = 0
    held: int = 0
    chosen: int = 0
    grades: tuple[str | None, ...] = ()
    ranks: tuple[int | None, ...] = ()
    notes: str = ""

    @property
    def ranking(self) -> bool:
        """Whether the answers are ordered, not graded."""
        return self.item is not None and self.item.ask == "ranking"

    @property
    def done(self) -> bool:
        """Whether every answer has its grade or its place."""
        given: tuple[object | None, ...] = self.ranks if self.ranking else self.grades
        return None not in given

    def place(self, position: int) -> None:
        """Give an answer the next place; the last one left follows by itself."""
        if position >= len(self.ranks) or self.ranks[position] is not None:
            return
        left = [place for place, rank in enumerate(self.ranks) if rank is None and place != position]
        ranks = list(self.ranks)
        ranks[position] = len(ranks) - len(left)
        if len(left) == 1:
            ranks[left[0]] = len(ranks)
        self.ranks = tuple(ranks)


class _Rating:
    def __init__(self, context: Context, agent_id: str, rater: str) -> None:
        self._context, self._agent_id, self._rater = context, agent_id, rater
        self._state = _State()
        self._note: ui.textarea | None = None
        self._busy = False

    async def show(self) -> None:
        await self._next()
        self._body()
        ui.keyboard(on_key=self._key, ignore=["input", "textarea"])

    async def _next(self) -> None:
        def reserve() -> _State:
            with self._context.database.write() as session:
                item = rating.reserve(session, self._agent_id, self._rater)
                return self._state_of(session, item)

        self._state = await run_in_threadpool(reserve)

    def _state_of(self, session: Session, item: Item | None) -> _State:
        waiting = rating.open_items(session, self._agent_id)
        held = rating.held_by_others(session, self._agent_id, self._rater)
        empty = (None,) * (len(item.answers) if item else 0)
        return _State(item, waiting, held, grades=empty, ranks=empty)

    @ui.refreshable_method
    def _body(self) -> None:
        item, several = self._state.item, len(self._state.grades)
        with ui.column().classes("full-width gap-3"):
            with ui.row().classes("full-width items-baseline justify-between"):
                title(f"Rate answers of {self._agent_id}")
                ui.label(f"{self._state.waiting} waiting").classes("quiet").mark("waiting")
            if item is None:
                with panel("Nothing to rate now"):
                    ui.label(self._why_nothing())
                    with ui.row():
                        button("Look again", self._again, kind="primary")
                        button("Undo (U)", self._undo)
                return
            with panel("Prompt").classes("full-width"):
                named(ui.label(item.prompt), "Prompt").classes("text gw-scroll").props("tabindex=0 role=group")
            if self._state.ranking:
                ui.label("Which answer is better?" if several == 2 else "Choose the best answer, then the next best.")
            with ui.element("div").classes("gw-answers full-width"):
                for position in range(len(item.answers)):
                    self._answer(position)
            self._note = ui.textarea("Note (optional)", value=self._state.notes, on_change=self._keep_note)
            self._note.classes("full-width").props(f"outlined autogrow maxlength={LIMITS.notes_chars}")
            self._note.on("keydown.esc", js_handler="(event) => event.target.blur()")
            with ui.row().classes("full-width items-center"):
                button("Next (Enter)", self._submit, kind="primary").set_enabled(self._state.done)
                if self._state.ranking:
                    equal = self._state.done and len(set(self._state.ranks)) == 1
                    tie = button("Equally good (0) ✓" if equal else "Equally good (0)", self._equal)
                    tie.props(f"aria-pressed={str(equal).lower()}")
                    button("Clear (C)", self._clear)
                button("Skip (S)", self._skip)
                button("Undo (U)", self._undo)
                keys = RANKING_KEYS if self._state.ranking else KEYS
                ui.label(" · ".join(f"{key} {meaning}" for key, meaning in keys.items())).classes("quiet")

    def _answer(self, position: int) -> None:
        item, several = self._state.item, len(self._state.grades) > 1
        assert item is not None
        name = f"Answer {LETTERS[position]}" if several else "Answer"
        at = several and not self._state.ranking and position == self._state.chosen
        marked = "gw-rated at" if at else "gw-rated"
        with panel(name).classes(marked).mark(f"answer-{position}"):
            text = ui.label(item.answers[position].response or "(empty)").classes("text gw-scroll")
            named(text, name).props("tabindex=0 role=group")
            if self._state.ranking:
                self._place_button(position)
                return
            with named(ui.element("div"), f"Grade of {name.lower()}").classes("gw-grades").props("role=group"):
                for key, (word, _) in GRADES.items():
                    chosen = self._state.grades[position] == key
                    with button(
                        "", lambda _, k=key: self._grade(position, k), kind="primary" if chosen else "plain"
                    ) as grade:
                        plain(f"{key} ")
                        plain(f"{word} ✓" if chosen else word)
                    grade.props(f"aria-pressed={str(chosen).lower()}")

    def _place_button(self, position: int) -> None:
        letter, rank, several = LETTERS[position], self._state.ranks[position], len(self._state.ranks)
        word = f"{letter} is better" if several == 2 else f"{letter} is the next best"
        said = f"{position + 1} {word}" if rank is None else f"{letter}: place {rank} of {several} ✓"
        chosen = button(said, lambda: self._place(position), kind="primary" if rank == 1 else "plain")
        chosen.props(f"aria-pressed={str(rank is not None).lower()}").classes("full-width")

    def _place(self, position: int) -> None:
        if len(self._state.ranks) == 2 and self._state.done:  # another choice between two
            self._state.ranks = (None, None)
        self._state.place(position)
        self._body.refresh()

    def _equal(self) -> None:
        self._state.ranks = (1,) * len(self._state.ranks)
        self._body.refresh()

    def _clear(self) -> None:
        self._state.ranks = (None,) * len(self._state.ranks)
        self._body.refresh()

    def _why_nothing(self) -> str:
        if self._state.held:
            return (
                f"Other people hold the rest: {self._state.held} of the waiting answers are open in front of them now. "
                "What they leave comes back within ten minutes: look again later."
            )
        return "You have seen all that waits. New answers appear here: look again later."

    def _keep_note(self, event: events.ValueChangeEventArguments[str | None]) -> None:
        self._state.notes = event.value or ""

    def _grade(self, position: int, key: str) -> None:
        state = self._state
        if position < len(state.grades):
            state.grades = (*state.grades[:position], key, *state.grades[position + 1 :])
            state.chosen = position + 1 if None in state.grades[position + 1 :] else position
            self._body.refresh()

    async def _again(self) -> None:
        await self._next()
        self._body.refresh()

    async def _submit(self) -> None:
        state = self._state
        item = state.item
        if item is None or not state.done:
            way = "Choose the better answer first: its number." if state.ranking else "Rate every answer first: 1 to 5."
            ui.notify(way, type="warning")
            return
        scores = [GRADES[grade][1] for grade in state.grades if grade is not None]
        ranks = [rank for rank in state.ranks if rank is not None]
        notes = state.notes.replace("\0", "")[: LIMITS.notes_chars] or None

        def store() -> None:
            with self._context.database.write() as session:
                if state.ranking:
                    rating.rank(session, item.id, self._rater, ranks, notes)
                else:
                    rating.rate(session, item.id, self._rater, scores, notes)

        await self._carry_out(store)

    async def _skip(self) -> None:
        item = self._state.item
        if item is None:
            return

        def store() -> None:
            with self._context.database.write() as session:
                rating.skip(session, item.id, self._rater)

        await self._carry_out(store)

    async def _carry_out(self, store: Callable[[], None]) -> None:
        """Store the input and continue; a key pressed twice counts once."""
        if self._busy or not self._allowed():
            return
        self._busy = True
        try:
            await run_in_threadpool(store)
        except ConflictError as error:
            ui.notify(str(error), type="warning")
        finally:
            self._busy = False
        await self._again()

    async def _undo(self) -> None:
        if not self._allowed():
            return

        def take_back() -> _State | None:
            with self._context.database.write() as session:
                found = rating.undo(session, self._agent_id, self._rater)
                if found is None:
                    return None
                state = self._state_of(session, found.item)
            state.notes = found.notes or ""
            if found.scores:
                state.grades = tuple(GRADE_OF.get(score) for score in found.scores)
            if found.ranks:
                state.ranks = found.ranks
            return state

        state = await run_in_threadpool(take_back)
        if state is None:
            ui.notify("There is nothing to undo.")
            return
        self._state = state
        self._body.refresh()
        ui.notify("Taken back: rate it again.")

    def _allowed(self) -> bool:
        caller = signed_in(self._context)
        if caller is None or not caller.may("rate"):
            ui.navigate.to(f"/login?next=/rate/{self._agent_id}")
            return False
        return True

    async def _key(self, event: events.KeyEventArguments) -> None:
        if not event.action.keydown or event.action.repeat or event.modifiers.ctrl or event.modifiers.meta:
            return
        key = event.key.name
        if self._state.ranking and key.isdecimal() and len(key) == 1:
            self._equal() if key == "0" else self._place(int(key) - 1)
        elif self._state.ranking and key.lower() == "c":
            self._clear()
        elif key in GRADES:
            self._grade(self._state.chosen, key)
        elif event.key.arrow_left or event.key.arrow_right:
            self._state.chosen = min(int(bool(event.key.arrow_right)), max(len(self._state.grades) - 1, 0))
            self._body.refresh()
        elif key == "Enter":
            await self._submit()
        elif key.lower() == "s":
            await self._skip()
        elif key.lower() == "u":
            await self._undo()
        elif key.lower() == "n" and self._note is not None:
            self._note.run_method("focus")
