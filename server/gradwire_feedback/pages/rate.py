"""`/rate/{agent_id}`: one item after the other, graded or ranked, blind to versions and others' scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import button, named, panel, title
from gradwire_shell.frame import page_at
from nicegui import events, ui
from nicegui.element import Element
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
    @page_at("/rate/{agent_id}", title="Rate answers")
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


@dataclass(frozen=True)
class _Answer:
    """The elements of an answer: its card, and a button for each grade, or one for its place."""

    card: Element
    choices: dict[str, ui.button]


class _Rating:
    """The page of a rater. What is marked or counted changes in place; only another item brings other elements."""

    def __init__(self, context: Context, agent_id: str, rater: str) -> None:
        self._context, self._agent_id, self._rater = context, agent_id, rater
        self._state = _State()
        self._shown: str | None = ""
        self._busy = False

    async def show(self) -> None:
        with ui.column().classes("full-width").style("gap: var(--gap-3)"):
            with ui.row().classes("full-width items-baseline justify-between"):
                title(f"Rate answers of {self._agent_id}")
                self._waiting = ui.label().classes("quiet")
            self._none = panel("Nothing to rate now")
            with self._none:
                self._why = ui.label()
                _button("Look again", self._next, kind="primary")
            self._item = ui.column().classes("full-width").style("gap: var(--gap-3)")
            with ui.row().classes("full-width items-center"):
                self._actions = ui.element("div").classes("gw-actions")
                _button("Undo (U)", self._undo)
                self._keys = ui.label().classes("quiet")
        await self._next()
        ui.keyboard(on_key=self._key, ignore=["input", "textarea"])

    async def _next(self) -> None:
        def reserve() -> _State:
            with self._context.database.write() as session:
                item = rating.reserve(session, self._agent_id, self._rater)
                return self._state_of(session, item)

        state = await run_in_threadpool(reserve)
        if state.item is not None and self._state.item is not None and state.item.id == self._state.item.id:
            state = replace(self._state, waiting=state.waiting, held=state.held)  # what was chosen stays chosen
        self._take(state)

    def _state_of(self, session: Session, item: Item | None) -> _State:
        waiting = rating.open_items(session, self._agent_id)
        held = rating.held_by_others(session, self._agent_id, self._rater)
        empty = (None,) * (len(item.answers) if item else 0)
        return _State(item, waiting, held, grades=empty, ranks=empty)

    def _take(self, state: _State) -> None:
        """Show another state, with new elements if it is of another item."""
        self._state, item = state, state.item
        self._waiting.text = f"{state.waiting} waiting"
        self._why.text = self._why_nothing()
        self._none.set_visibility(item is None)
        if self._shown != (shown := item.id if item is not None else None):
            self._shown = shown
            self._item.clear()
            self._actions.clear()
            if item is not None:
                with self._item:
                    self._show_item(item)
                with self._actions:
                    self._show_actions()
        if item is not None:
            self._note.value = state.notes
        self._keys.text = "" if item is None else _described(RANKING_KEYS if state.ranking else KEYS)
        self._mark()

    def _show_item(self, item: Item) -> None:
        several = len(item.answers)
        with panel("Prompt").classes("full-width"):
            named(ui.label(item.prompt), "Prompt").classes("text gw-scroll").props("tabindex=0 role=group")
        if self._state.ranking:
            ui.label("Which answer is better?" if several == 2 else "Choose the best answer, then the next best.")
        with ui.element("div").classes("gw-answers full-width"):
            self._answers = [self._answer(position) for position in range(several)]
        self._note = ui.textarea("Note (optional)", on_change=self._keep_note)
        self._note.classes("full-width").props(f"outlined autogrow maxlength={LIMITS.notes_chars}")
        self._note.on("keydown.esc", js_handler="(event) => event.target.blur()")

    def _show_actions(self) -> None:
        self._submit_button = _button("Next (Enter)", self._submit, kind="primary")
        if self._state.ranking:
            self._tie = _button("", self._equal)
            _button("Clear (C)", self._clear)
        _button("Skip (S)", self._skip)

    def _answer(self, position: int) -> _Answer:
        item, several = self._state.item, len(self._state.grades) > 1
        assert item is not None
        name = f"Answer {LETTERS[position]}" if several else "Answer"
        choices: dict[str, ui.button] = {}
        with panel(name).classes("gw-rated") as card:
            text = ui.label(item.answers[position].response or "(empty)").classes("text gw-scroll")
            named(text, name).props("tabindex=0 role=group")
            if self._state.ranking:
                choices[""] = _button("", lambda: self._place(position)).classes("full-width")
                return _Answer(card, choices)
            with named(ui.element("div"), f"Grade of {name.lower()}").classes("gw-grades").props("role=group"):
                for key in GRADES:
                    choices[key] = _button("", lambda _, k=key: self._grade(position, k))
        return _Answer(card, choices)

    def _mark(self) -> None:
        """Show what is chosen."""
        state = self._state
        if state.item is None:
            return
        self._submit_button.set_enabled(state.done)
        for position, answer in enumerate(self._answers):
            at = len(state.grades) > 1 and not state.ranking and position == state.chosen
            answer.card.classes(add="at" if at else "", remove="" if at else "at")
            for key, choice in answer.choices.items():
                if state.ranking:
                    rank = state.ranks[position]
                    _press(choice, self._placed(position), rank is not None, primary=rank == 1)
                else:
                    chosen = state.grades[position] == key
                    word = GRADES[key][0]
                    _press(choice, f"{key} {word} ✓" if chosen else f"{key} {word}", chosen, primary=chosen)
        if state.ranking:
            equal = state.done and len(set(state.ranks)) == 1
            _press(self._tie, "Equally good (0) ✓" if equal else "Equally good (0)", equal)

    def _placed(self, position: int) -> str:
        letter, rank, several = LETTERS[position], self._state.ranks[position], len(self._state.ranks)
        word = f"{letter} is better" if several == 2 else f"{letter} is the next best"
        return f"{position + 1} {word}" if rank is None else f"{letter}: place {rank} of {several} ✓"

    def _place(self, position: int) -> None:
        if len(self._state.ranks) == 2 and self._state.done:  # another choice between two
            self._state.ranks = (None, None)
        self._state.place(position)
        self._mark()

    def _equal(self) -> None:
        self._state.ranks = (1,) * len(self._state.ranks)
        self._mark()

    def _clear(self) -> None:
        self._state.ranks = (None,) * len(self._state.ranks)
        self._mark()

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
            self._mark()

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
        await self._next()

    async def _undo(self) -> None:
        if not self._allowed():
            return

        def take_back() -> _State | None:
            with self._context.database.write() as session:
                taken_back = rating.undo(session, self._agent_id, self._rater)
                if taken_back is None:
                    return None
                state = self._state_of(session, taken_back.item)
            state.notes = taken_back.notes or ""
            if taken_back.scores:
                state.grades = tuple(GRADE_OF.get(score) for score in taken_back.scores)
            if taken_back.ranks:
                state.ranks = taken_back.ranks
            return state

        state = await run_in_threadpool(take_back)
        if state is None:
            ui.notify("There is nothing to undo.")
            return
        self._take(state)
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
            self._mark()
        elif key == "Enter":
            await self._submit()
        elif key.lower() == "s":
            await self._skip()
        elif key.lower() == "u":
            await self._undo()
        elif key.lower() == "n" and self._state.item is not None:
            self._note.run_method("focus")


def _described(keys: dict[str, str]) -> str:
    return " · ".join(f"{key} {meaning}" for key, meaning in keys.items())


def _button(text: str, on_click: Callable[..., Any], *, kind: str = "plain") -> ui.button:
    """A button beside the page's keys: Enter is its own while it has the focus, which the mouse does not give it."""
    made = button(text, on_click, kind=kind)
    made.on("click", js_handler="(event) => event.detail && document.activeElement.blur()")
    made.on("keydown.enter", js_handler="(event) => event.stopPropagation()")
    return made


def _press(choice: ui.button, text: str, pressed: bool, *, primary: bool = False) -> None:
    """Show a choice as taken or not."""
    choice.text = text
    choice.props(f"aria-pressed={str(pressed).lower()}")
    choice.classes(add="gw-primary" if primary else "gw-plain", remove="gw-plain" if primary else "gw-primary")
