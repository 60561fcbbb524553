"""Browser sessions: the caller and the rater behind a page."""

from __future__ import annotations

from contextlib import AbstractContextManager
from urllib.parse import quote

from fastapi.responses import RedirectResponse
from gradwire_shell.components import panel, question, title
from gradwire_shell.frame import frame
from nicegui import app, ui
from nicegui.element import Element

from gradwire_feedback.context import Context
from gradwire_feedback.names import is_agent_id
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store.keys import Caller, Role, caller_of
from gradwire_feedback.store.problems import UnauthenticatedError

AGENTS = ("Agents", "/")


def shell(agent_id: str, here: str, keys: dict[str, str] | None = None) -> AbstractContextManager[Element]:
    """The frame of an agent's page; its content goes into the body of ``with``.

    Args:
        here: ``"rate"``, ``"ratings"`` or ``"policies"``.
        keys: The page's keys and their effects, for the help.
    """
    sections = (AGENTS, *((word.title(), f"/{word}/{agent_id}") for word in ("rate", "ratings", "policies")))
    return framed(sections, f"/{here}/{agent_id}", keys)


def framed(
    sections: tuple[tuple[str, str], ...], here: str, keys: dict[str, str] | None = None
) -> AbstractContextManager[Element]:
    """The frame of a page, with a way to sign out where somebody is signed in."""

    def leave() -> None:
        app.storage.user.pop("key", None)
        app.storage.user.pop("person", None)
        ui.navigate.to("/login")

    known = "key" in app.storage.user or "person" in app.storage.user
    return frame("feedback", sections, here, narrow=True, keys=keys or {}, sign_out=leave if known else None)


def signed_in(context: Context) -> Caller | None:
    """Return the caller of the browser's key; looked up each time, so that revoking takes effect at once."""
    with context.database.read() as session:
        try:
            return caller_of(session, app.storage.user.get("key"))
        except UnauthenticatedError:
            return None


def entrance(context: Context, role: Role, agent_id: str, path: str) -> Caller | RedirectResponse | None:
    """Return the caller of a page, a redirection to the sign-in page, or None if the page shows why it is empty."""
    if not is_agent_id(agent_id):
        ui.label("There is no such agent: ids are letters, digits, '.', '_' and '-'.").classes("text-h6 q-pa-lg")
        return None
    caller = signed_in(context)
    if caller is None:
        return RedirectResponse(f"/login?next={quote(path, safe='')}")
    if not caller.may(role):
        ui.label(f"The key {caller.name} has the role {caller.role}; this page needs {role}.").classes(
            "text-h6 q-pa-lg"
        )
        return None
    return caller


def rater_of(caller: Caller) -> str | None:
    """Name the person who rates: the key's owner, or on a service without keys who they said they are; None if unasked.

    The same person in two browsers is one rater.
    """
    return caller.name or app.storage.user.get("person")


def ask_name() -> None:
    """Ask a person for their name, once for each browser; the page then begins anew."""

    def enter(typed: str) -> None:
        name = " ".join(typed.replace("\0", "").split())[: LIMITS.name_chars]
        if name:
            app.storage.user["person"] = name
            ui.navigate.reload()

    with panel():
        title("Who are you?")
        ui.label("Your name stands beside your ratings. Use the same one in every browser.")
        question("Your name", "Continue", enter)
