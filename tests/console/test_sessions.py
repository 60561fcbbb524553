"""The console's pages of rollout sessions."""

from __future__ import annotations

from collections.abc import Iterator

import gradwire.sync
import httpx
import pytest
from playwright.sync_api import Page, expect
from support.console import Console
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

pytestmark = pytest.mark.long

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Console, gradwire.sync.RolloutSession]]:
    """A session of two conversations, of which the first goes on."""
    folder = tmp_path_factory.mktemp("sessions")
    model = tiny_model(folder / "model", context_length=512)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    server = HttpServer(model, folder / "state", free_port())
    server.start()
    with gradwire.sync.connect(server.address) as service, Console(server.address) as console:
        session = service.rollout_session("tiny", name=f"agent {EVIL}", group="g")
        with httpx.Client(base_url=session.openai_url, headers={"x-api-key": session.key}, timeout=60) as http:

            def ask(*messages: dict[str, str]) -> dict[str, str]:
                asked = {"model": "x", "messages": messages, "max_tokens": 6, "ignore_eos": True}
                answer: dict[str, str] = http.post("/chat/completions", json=asked).json()["choices"][0]["message"]
                return {"role": "assistant", "content": answer["content"]}

            first = {"role": "user", "content": f"fix it {EVIL}"}
            ask(first, ask(first), {"role": "user", "content": "go on"})
            ask({"role": "system", "content": "make a title"}, first)
        yield console, session
    server.end()


def test_a_session_is_shown_branch_by_branch(shown: tuple[Console, gradwire.sync.RolloutSession], page: Page) -> None:
    console, session = shown
    page.goto(f"{console.url}/sessions")
    page.get_by_role("link", name=f"agent {EVIL}").click()
    expect(page.get_by_role("heading", name="Branch 0")).to_be_visible()
    expect(page.get_by_text("side call: not trained on")).to_have_count(1)
    expect(page.get_by_text("leaves turn 0: system")).to_have_count(1)
    expect(page.get_by_text("turn 1, 6 tokens, version 0")).to_be_visible()
    expect(page.locator(".gw-turn.answer span[title^='log-probability']")).to_have_count(18)
    expect(page.locator(".gw-main img")).to_have_count(0)
    page.get_by_role("button", name="End").click()
    page.get_by_role("dialog").get_by_role("button", name="End").click()
    expect(page.get_by_text("ended: ended in the console")).to_be_visible()
    assert session.end("later", reward=0.5, turn_rewards={1: 0.25}).end_reason == "ended in the console"
    page.reload()
    expect(page.get_by_text("reward 0.25")).to_be_visible()
    page.goto(f"{console.url}/sessions")
    expect(page.get_by_role("region", name="Sessions").locator("tr[data-key]")).to_contain_text("0.5")
    [listed] = page.request.get(f"{console.url}/api/sessions").json()
    assert (listed["num_turns"], listed["reward"]) == (3, 0.5)
    rollout = session.rollout()
    assert rollout.reward == 0.5 and rollout.turn_rewards == {1: 0.25}
