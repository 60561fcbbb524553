"""The pages for people: `/`, `/offer`, and an agent's `/rate`, `/ratings` and `/policies`, in the API's application."""

from __future__ import annotations

import os
import secrets

from fastapi import FastAPI
from gradwire_shell.frame import add_pages

from gradwire_feedback.context import Context
from gradwire_feedback.pages import home, login, offer, policies, rate, ratings
from gradwire_feedback.pages.session import AGENTS

SECRET_FILE = ".session-secret"


def mount(app: FastAPI, context: Context) -> None:
    """Add the pages to the application, after its own routes."""
    for page in (home, login, offer, rate, ratings, policies):
        page.register(context)
    add_pages(app, "feedback", secret=_session_secret(context), sections=(AGENTS,))


def _session_secret(context: Context) -> str:
    """Return the secret that signs the browsers' cookies; stored, so that sessions survive a restart."""
    file = context.settings.models_dir / SECRET_FILE
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(secrets.token_urlsafe(32))
    except FileExistsError:
        pass  # created by an earlier start
    return file.read_text()
