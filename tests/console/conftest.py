"""A console over the tests' server, and pages of it; ``browser`` is in the tests' first conftest."""

from __future__ import annotations

from collections.abc import Iterator

import gradwire
import pytest
from gradwire import sync
from playwright.sync_api import Browser, Page
from support.console import Console, page_of
from support.server import Server


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[sync.ServiceClient]:
    with gradwire.sync.connect(server.address) as service:
        yield service


@pytest.fixture(scope="module")
def console(server: Server) -> Iterator[Console]:
    with Console(server.address) as console:
        yield console


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with page_of(browser) as page:
        yield page
