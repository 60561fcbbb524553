"""The console as a user starts it, and a browser that is kept from everything but this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, Route

from support.child import Child
from support.chromium import PATIENCE_MS


class Console(Child):
    """`gradwire console` as a child process."""

    def __init__(self, server: str, *args: str, key: str = "") -> None:
        command = [sys.executable, "-m", "gradwire_console.cli", server, "--address", "127.0.0.1:0", *args]
        super().__init__(command, "gradwire console: listening on ", {"GRADWIRE_API_KEY": key})

    def __enter__(self) -> Console:
        self.url = self.launch()
        return self


@contextmanager
def page_of(browser: Browser, width: int = 1280) -> Iterator[Page]:
    """A page of a browser of its own; fails if it asked another host for something, or a script failed or
    was kept from running."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(PATIENCE_MS)

    def only_here(route: Route) -> None:
        if re.match(r"https?://127\.0\.0\.1[:/]", route.request.url):
            route.continue_()
        else:
            wrong.append(route.request.url)
            route.abort()

    context.route("**/*", only_here)
    page = context.new_page()

    def said(text: str) -> None:
        print(f"browser at {page.url}: {text}")  # shown where a test fails
        if "Content Security Policy" in text:
            wrong.append(text)

    page.on("console", lambda message: said(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    yield page
    context.close()
    assert wrong == []
