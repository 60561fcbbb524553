"""Accessibility of pages, as axe-core finds it; tests that need it are skipped without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
AXE = ROOT / "node_modules/axe-core/axe.min.js"
FADE_MS = 500
"""Milliseconds in which dialogs and colours fade in; what fades is pale until then."""


def violations(page: Page) -> list[tuple[str, ...]]:
    """Serious and critical violations of a page as it is shown: page, impact, rule and an element."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm install --no-save axe-core")
    page.wait_for_timeout(FADE_MS)
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, v.nodes[0].html]))")
    return [(page.url, *each) for each in found if each[0] in ("serious", "critical")]


def pages_of(product: str) -> set[str]:
    """The paths of a product's pages, with ``*`` for what differs: ``"run/*"``."""
    sources = (ROOT / f"server/gradwire_{product}/pages").glob("*.py")
    found = (path for file in sources for path in re.findall(r'@page_at\("/([^"]*)"', file.read_text()))
    return {re.sub(r"\{\w+\}", "*", path) for path in found} | {"login"}  # a form of its own


def page_at(path: str) -> str:
    """The page of :func:`pages_of` that has an address: ids of runs and other things stand behind its first word."""
    words = re.split("[?#]", path)[0].split("/")
    return "/".join("*" if number == 1 else word for number, word in enumerate(words))
