"""The page that asks for a key of the server."""

from __future__ import annotations

from gradwire_shell.frame import add_sign_in
from nicegui import app

from gradwire_console.workspace import Workspaces


def register(workspaces: Workspaces) -> None:
    async def enter(key: str) -> str:
        if not key:
            return "Paste a key of the server: gradwire keys create NAME"
        return await workspaces.sign_in(str(app.storage.browser["id"]), key)

    add_sign_in("console", "Key of the server", enter)
