"""From the console's playground to people's ratings: the link "Rate these answers"."""

from __future__ import annotations

import re

import gradwire
import httpx
import pytest
from gradwire import sync
from playwright.sync_api import expect
from support.chromium import launched
from support.console import Console, page_of
from support.feedback import FeedbackService
from support.server import Server

pytestmark = [pytest.mark.long, pytest.mark.browser]


def test_answers_of_the_playground_are_handed_over_and_rated(
    server: Server, service: FeedbackService, api: httpx.Client
) -> None:
    with gradwire.sync.connect(server.address) as connected:
        run = connected.create_run("tiny", lora={"rank": 2}, name="handed over")
        checkpoint = saved(run)
    with Console(server.address, "--feedback", service.url) as console, launched() as browser, page_of(browser) as page:
        page.goto(f"{console.url}/playground?models=tiny,{checkpoint}&prompt=Say <b>1</b> %26 2")
        page.get_by_role("button", name="Generate").click()
        with page.expect_popup() as opened:
            page.get_by_role("link", name="Rate these answers").click()
        offer = opened.value
        expect(offer.get_by_text("Say <b>1</b> & 2")).to_be_visible()
        expect(offer.get_by_role("heading", name="Answer 2")).to_be_visible()
        offer.get_by_label("Agent").fill("no such name")
        offer.get_by_role("button", name="Ask people").click()
        expect(offer.get_by_text("Name the agent")).to_be_visible()
        offer.get_by_label("Agent").fill("handed")
        offer.get_by_role("button", name="Ask people").click()
        offer.wait_for_url("**/rate/handed")
        offer.get_by_label("Your name").fill("Ann")
        offer.get_by_role("button", name="Continue").click()
        offer.get_by_role("button", name="1 A is better").click()
        offer.get_by_role("button", name="Next (Enter)").click()
        expect(offer.get_by_text("Nothing to rate now")).to_be_visible()
        page.goto(f"{service.url}/offer#%zz")
        expect(page.get_by_text("Nothing was handed over.")).to_be_visible()
        page.goto("about:blank")
        page.goto(f'{service.url}/offer#{{"prompt": "", "response": "Yes."}}')
        expect(page.get_by_text("What was handed over cannot be rated: prompt")).to_be_visible()
        graded = {"prompt": "1", "response": "2", "score": 0.75, "runId": f"{checkpoint} 1"}
        assert api.post("/feedback/handed", json=graded).is_success
        page.goto(f"{console.url}/ratings")
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name="handed over, kept"))
        expect(row).to_contain_text(re.compile(r"handed\s*0\.750\s*1\s*(0|100)%\s*1"))
        expect(page.get_by_role("row", name=re.compile("^tiny handed"))).to_be_visible()
        row.get_by_role("link").click()
        expect(page.get_by_role("row", name=re.compile("kept"))).to_contain_text(re.compile("0.75 of 1, won [01] of 1"))
        found = httpx.get(f"{console.url}/api/ratings").json()
        (of_checkpoint,) = [each for each in found if each["agent"] == "handed" and each["source"] == checkpoint]
        assert of_checkpoint["scores"] == 1 and of_checkpoint["wins"] + of_checkpoint["losses"] == 1
    (pair,) = api.get("/handed/pairs").json()
    assert pair["prompt"] == "Say <b>1</b> & 2" and pair["rater"] == "Ann"


def saved(run: sync.TrainingClient) -> str:
    """A checkpoint of a run that has taken a step."""
    run.forward_backward({"input_ids": [[5, 6, 7, 8, 9, 10]] * 2}, "causal_lm")
    run.optim_step(learning_rate=1e-2).result(60)
    return run.save_checkpoint("kept").result(60).path
