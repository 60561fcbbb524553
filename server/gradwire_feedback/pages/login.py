"""The sign-in page; the session stores the digest of a key of the service."""

from __future__ import annotations

from gradwire_http.browsers import local_path
from nicegui import app, ui

from gradwire_feedback.context import Context
from gradwire_feedback.pages.session import STYLE
from gradwire_feedback.store.keys import caller_of, digest_of
from gradwire_feedback.store.problems import UnauthenticatedError


def register(context: Context) -> None:
    @ui.page("/login", title="Sign in")
    def login(next: str = "/docs") -> None:
        ui.add_css(STYLE)
        target = local_path(next, "/docs")

        def enter() -> None:
            digest = digest_of(key.value.strip())
            with context.database.read() as session:
                try:
                    caller_of(session, digest)
                except UnauthenticatedError:
                    ui.notify("This key is not valid.", type="negative")
                    return
            app.storage.user["key"] = digest
            ui.navigate.to(target)

        with ui.card().classes("absolute-center").style("min-width: 22rem"):
            ui.label("Sign in").classes("text-h6")
            key = ui.input("API key", password=True).classes("full-width").on("keydown.enter", enter)
            ui.button("Sign in", on_click=enter).props("no-caps")
