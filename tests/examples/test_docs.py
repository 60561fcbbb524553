"""The Python in README.md and docs/ runs as written, block after block, in one session a page."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from support.server import Server

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ("agents.md", "openai.md", "openai_fine_tuning.md", "images.md")
"""Pages whose code is run by tests with a server of their own."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, each with the line it begins at."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start(1)), found[1]


def test_there_is_something_to_run() -> None:
    assert sum(1 for page in PAGES for _ in blocks(page)) >= 8


@pytest.mark.holds_loop("pages show code of scripts without a loop, too")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(blocks(page)) and page.name not in ELSEWHERE], ids=lambda page: page.name
)
async def test_the_code_of_a_page_runs(
    page: Path, example_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = gradwire.connect
    # Whatever server a page speaks to, here it is one on loopback that holds a tiny model under the page's name.
    monkeypatch.setattr(gradwire, "connect", lambda *_, **__: connect(example_server.address))
    plainly = gradwire.sync.connect
    monkeypatch.setattr(gradwire.sync, "connect", lambda *_, **__: plainly(example_server.address))
    # The page that sets tracing up for a program must not do so for the tests that come after it.
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", lambda provider: provider.shutdown())
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "page"}
    for line, source in blocks(page):
        tree = ast.increment_lineno(ast.parse(source), line)
        code = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        waiting = eval(code, session)
        if inspect.iscoroutine(waiting):
            await waiting


@pytest.mark.parametrize(
    ("page", "program"), [("README.md", "rl_fifteen_lines.py"), ("docs/rl.md", "rl_agent_fifty_lines.py")]
)
def test_a_page_shows_the_program_that_is_tested(page: str, program: str) -> None:
    source = (ROOT / "examples" / program).read_text()
    assert source in [block for _, block in blocks(ROOT / page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
