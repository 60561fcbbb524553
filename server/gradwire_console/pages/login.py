"""The page that asks for a key of the server."""

from __future__ import annotations

from gradwire_http.browsers import local_path
from gradwire_shell.frame import page_at, sign_in
from nicegui import app

from gradwire_console.workspace import Workspaces


def register(workspaces: Workspaces) -> None:
    @page_at("/login", title="Sign in · gradwire")
    def login(next: str = "/") -> None:
        browser = str(app.storage.browser["id"])

        async def enter(key: str) -> str:
            return (
                await workspaces.sign_in(browser, key)
                if key
                else "Paste a key of the server: gradwire keys create NAME"
            )

        sign_in("console", "Key of the server", enter, local_path(next, "/"))
