"""The sign-in page; the session stores the digest of a key of the service."""

from __future__ import annotations

from gradwire_shell.frame import add_sign_in
from nicegui import app

from gradwire_feedback.context import Context
from gradwire_feedback.store.keys import caller_of, digest_of
from gradwire_feedback.store.problems import UnauthenticatedError


def register(context: Context) -> None:
    async def enter(key: str) -> str:
        digest = digest_of(key)
        with context.database.read() as session:
            try:
                caller_of(session, digest)
            except UnauthenticatedError:
                return "This key is not valid."
        app.storage.user["key"] = digest
        return ""

    add_sign_in("feedback", "API key", enter)
