"""The pages in a real browser: Chromium, driven by Playwright, kept from everything but this machine."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from support.axe import page_at, pages_of, violations
from support.chromium import PATIENCE_MS
from support.feedback import QUICK, FeedbackService, run_keys, scores
from support.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

LEAST = {"text": 4.5, "shape": 3.0, "token": 3.0}

MEASURE = """async () => {
  const { echarts } = await import("nicegui-echart");
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const found = rgba(getComputedStyle(element).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const luminance = (colour) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (colour, opacity, below) => {
    const above = rgba(colour), share = above[3] / 255 * opacity;
    const seen = above.map((c, i) => share * c + (1 - share) * below[i]);
    const [dark, light] = [luminance(seen), luminance(below)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const painted = (colour) => typeof colour === "string" && !["none", "transparent"].includes(colour);
  const found = [];
  for (const element of document.querySelectorAll(".gw-chart, .gw-plot")) {
    const chart = echarts.getInstanceByDom(element), below = ground(element), name = element.ariaLabel;
    if (!chart || !element.clientHeight) continue;
    const add = (kind, colours, opacity) => found.push(
      [name, kind, colours.join(" or "), Math.max(...colours.map((colour) => contrast(colour, opacity, below)))]);
    for (const text of element.querySelectorAll("svg text"))
      add("text", [getComputedStyle(text).fill], 1);
    for (const drawn of chart.getZr().storage.getDisplayList(true)) {
      const { fill, stroke, opacity, lineWidth } = drawn.style, visible = opacity ?? 1;
      if (drawn.invisible || drawn.ignore || String(drawn.anid).startsWith("line_")) continue;  // a line of the grid
      if (drawn.type === "tspan" || drawn.type === "text") {
        if (!element.querySelector("svg") && painted(fill)) add("text", [fill], visible);
        continue;
      }
      const colours = [fill, lineWidth === 0 ? "none" : stroke].filter(painted);
      if (colours.length && visible > 0 && drawn.type !== "rect" || drawn.type === "rect" && painted(fill))
        add("shape", colours, visible);
    }
  }
  const style = getComputedStyle(document.body);
  for (let n = 1; n <= 8; n++)
    found.push(["curves", "token", `--s${n}`, contrast(style.getPropertyValue(`--s${n}`).trim(), 1,
                rgba(style.getPropertyValue("--surface").trim()))]);
  return found;
}"""


@dataclass(frozen=True)
class Measured:
    """A text or shape of a chart.

    Attributes:
        chart: Its name.
        kind: ``"text"``, ``"shape"`` (of its fill and its border the better one), or ``"token"`` for a curve's colour.
        colour: As it was set.
        contrast: Against what is behind the chart, 1 to 21.
    """

    chart: str
    kind: str
    colour: str
    contrast: float

    @property
    def too_low(self) -> bool:
        return self.contrast < LEAST[self.kind]


def chart_contrasts(page: Page) -> list[Measured]:
    """Measure what the page's charts show, as WCAG 2 does; lines of a grid carry no meaning and are left out."""
    return [Measured(*each) for each in page.evaluate(MEASURE)]


pytestmark = [pytest.mark.long, pytest.mark.browser]

CHARTS = {
    "Histogram of the scores", "Mean score and interval of each version", "Mean predicted reward of each training step",
    "Loss", "Predicted reward of the answers",
}  # fmt: skip
SCREENSHOTS = os.environ.get("GRADWIRE_SCREENSHOTS")
"""A folder for screenshots of the documentation; none are made without it."""


@pytest.fixture
def refused() -> list[str]:
    """Requests off this machine that a page tried."""
    return []


@pytest.fixture
def page(browser: Browser, refused: list[str]) -> Iterator[Page]:
    page = open_page(browser, refused)
    yield page
    page.context.close()
    assert refused == []


def open_page(browser: Browser, refused: list[str]) -> Page:
    """A browser of its own, as another person has."""
    context = browser.new_context(viewport={"width": 1100, "height": 640})
    context.set_default_timeout(PATIENCE_MS)

    def only_here(route: Route) -> None:
        if re.match(r"https?://127\.0\.0\.1[:/]", route.request.url):
            route.continue_()
        else:
            refused.append(route.request.url)
            route.abort()

    context.route("**/*", only_here)
    return context.new_page()


def keep(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.evaluate("scrollTo(0, 0)")  # else the bar is in the middle
        page.wait_for_timeout(1000)
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


def add_item(api: httpx.Client, agent: str, prompt: str, response: str, **more: object) -> None:
    answer = api.post(f"/items/{agent}", json={"prompt": prompt, "response": response, **more})
    assert answer.status_code == 201, answer.text


@contextmanager
def pressing(button: Locator) -> Iterator[None]:
    """The mouse goes down on a button, and up again at the end: a click, unless another button stands there by then."""
    button.hover()
    button.page.mouse.down()
    yield
    button.page.mouse.up()


def introduce(page: Page, name: str) -> None:
    page.get_by_label("Your name").fill(name)
    with page.expect_navigation():  # keys are for its scripts
        page.get_by_role("button", name="Continue").click()


def test_rating_by_keyboard_and_mouse(service: FeedbackService, api: httpx.Client, page: Page) -> None:
    add_item(api, "kettle", "How do I descale a kettle?", "Boil water with citric acid in it, wait, rinse twice.")
    add_item(
        api, "kettle", "Explain photosynthesis to a child.", "Plants eat sunlight.",
        others=[{"response": "Plants catch sunlight with their leaves and make sugar of air and water with it."}],
    )  # fmt: skip
    add_item(api, "kettle", "What is the capital of Peru?", "Lima.")
    page.goto(f"{service.url}/rate/kettle")
    introduce(page, "Ann")
    expect(page.get_by_text("How do I descale a kettle?")).to_be_visible()
    assert "v1" not in page.content() and "base" not in page.locator("body").inner_text(), "blind to the version"
    page.keyboard.press("4")
    expect(page.get_by_role("button", name="Next (Enter)")).to_be_enabled()
    page.get_by_label("Note (optional)").fill("4 is not pressed here, nor s or u")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Answer B")).to_be_visible()
    with pressing(page.get_by_role("button", name="5 Excellent").nth(1)):
        page.keyboard.press("2")
        chosen = page.get_by_role("button", name="2 Weak").first
        expect(chosen).to_have_attribute("aria-pressed", "true")
        expect(chosen).to_contain_text("✓")
    expect(page.get_by_role("button", name="Next (Enter)")).to_be_enabled()
    keep(page, "feedback-rate")
    page.get_by_label("Note (optional)").fill("B says how")
    page.get_by_role("button", name="Next (Enter)").click()
    expect(page.get_by_text("capital of Peru")).to_be_visible()
    page.keyboard.press("u")
    expect(page.get_by_label("Note (optional)")).to_have_value("B says how")
    assert api.get("/kettle/pairs").json() == []
    for key in ("1", "4"):
        page.keyboard.press(key)
        page.wait_for_timeout(300)
    expect(page.get_by_role("button", name="Next (Enter)")).to_be_enabled()
    page.keyboard.press("Enter")
    expect(page.get_by_text("capital of Peru")).to_be_visible()
    page.keyboard.press("s")
    expect(page.get_by_text("Nothing to rate now")).to_be_visible()
    (pair,) = api.get("/kettle/pairs").json()
    assert pair["rejected"] == "Plants eat sunlight."
    assert "3 feedback samples" in api.post("/train_policy/kettle", json={}).json()["detail"]
    page.goto(f"{service.url}/ratings/kettle")
    expect(page.get_by_text("by Ann").first).to_be_visible()
    page.get_by_label("Score").first.fill("0.1")
    with pressing(page.get_by_role("button", name="Correct").first):
        page.get_by_role("button", name="Withdraw").last.dispatch_event("click")
        expect(page.get_by_text(re.compile("Withdrawn: score 0.75, by Ann"))).to_be_visible()
    expect(page.get_by_text(re.compile("^score 0.1, by Ann"))).to_be_visible()
    assert "2 feedback samples" in api.post("/train_policy/kettle", json={}).json()["detail"]


def test_pairs_and_rankings_by_keyboard_and_mouse(service: FeedbackService, api: httpx.Client, page: Page) -> None:
    add_item(api, "order", "Which is better?", "Yes.", others=[{"response": "No."}], ask="ranking")
    add_item(
        api, "order", "Best of three?", "One.", others=[{"response": "Two."}, {"response": "Three."}], ask="ranking"
    )
    page.goto(f"{service.url}/rate/order")
    introduce(page, "Ann")
    expect(page.get_by_role("button", name="1 A is better")).to_be_visible()
    expect(page.get_by_role("button", name="2 Weak")).to_have_count(0)
    page.keyboard.press("2")
    expect(page.get_by_role("button", name="B: place 1 of 2 ✓")).to_be_visible()
    page.keyboard.press("0")
    expect(page.get_by_role("button", name="Equally good (0) ✓")).to_be_visible()
    page.get_by_role("button", name="Clear (C)").focus()
    page.keyboard.press("Enter")  # the button's own
    page.get_by_role("button", name="1 A is better").click()
    expect(page.get_by_role("button", name="B: place 2 of 2 ✓")).to_be_visible()
    page.keyboard.press("Enter")
    for place, (number, letter) in enumerate(((3, "C"), (1, "A")), 1):
        page.get_by_role("button", name=f"{number} {letter} is the next best").click()
        placed = page.get_by_role("button", name=f"{letter}: place {place} of 3 ✓")
        expect(placed).to_be_visible()
    expect(page.get_by_role("button", name="B: place 3 of 3 ✓")).to_be_visible()
    page.get_by_role("button", name="Next (Enter)").click()
    expect(page.get_by_text("Nothing to rate now")).to_be_visible()
    page.keyboard.press("u")
    expect(page.get_by_role("button", name="C: place 1 of 3 ✓")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Nothing to rate now")).to_be_visible()
    pairs = [(pair["chosen"], pair["rejected"]) for pair in api.get("/order/pairs").json()]
    assert pairs == [("Yes.", "No."), ("Three.", "One."), ("Three.", "Two."), ("One.", "Two.")]
    page.goto(f"{service.url}/ratings/order")
    expect(page.get_by_text("1. Three.").first).to_be_visible()
    page.get_by_role("button", name="Withdraw").first.click()
    expect(page.get_by_text("Withdrawn: by Ann")).to_have_count(2)
    assert len(api.get("/order/pairs").json()) == 1


def test_older_pages_show_each_rating_and_ranking_once(service: FeedbackService, api: httpx.Client, page: Page) -> None:
    """Both are numbered by one counter."""
    rows = [{"prompt": f"Ranked {n}", "responses": ["Better.", "Worse."]} for n in range(31)]
    assert api.post("/feedback/long", json=scores(31)).status_code == 201
    assert api.post("/rankings/long", json=rows[:-1]).status_code == 201
    assert api.post("/feedback/long", json=scores(1, 31)).status_code == 201
    assert api.post("/rankings/long", json=rows[-1:]).status_code == 201
    page.goto(f"{service.url}/ratings/long")
    introduce(page, "Ann")
    seen = []
    for first in ("Ranked 30", "Ranked 1", "Say 2"):
        panels = page.locator("section.gw-panel")
        expect(panels.first).to_contain_text(first)
        seen += panels.all_inner_texts()
        if first != "Say 2":
            page.get_by_role("button", name="Older").click()
    assert len(seen) == len(set(seen)) == 63
    expect(page.get_by_role("button", name="Older")).to_be_hidden()
    page.get_by_role("button", name="Newest").click()
    expect(page.get_by_text("Ranked 30")).to_be_visible()


def test_the_start_page_and_the_api_documentation_need_no_internet(
    service: FeedbackService, api: httpx.Client, page: Page
) -> None:
    """The fixture refuses whatever a page asks of another machine."""
    add_item(api, "welcome", "Hello", "Good morning.")
    page.goto(f"{service.url}/")
    page.get_by_role("link", name="welcome").click()
    page.wait_for_url("**/policies/welcome")
    page.get_by_role("link", name="Agents").click()
    page.get_by_role("link", name="The API and its documentation").click()
    expect(page.get_by_text("Submit Feedback")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_the_pages_on_a_phone_too(
    service: FeedbackService, api: httpx.Client, page: Page, scheme: Literal["light", "dark"]
) -> None:
    agent = f"phone-{scheme}"
    api.post(f"/feedback/{agent}", json=scores(12))
    long = "A long answer goes on and on, and says little. " * 60
    add_item(api, agent, "Explain the tides. " * 40, long, others=[{"response": long}])
    page.emulate_media(color_scheme=scheme)
    faults: list[tuple[str, ...]] = []
    offered = quote(json.dumps({"prompt": "Explain the tides.", "response": long, "others": [{"response": long}]}))
    paths = ("", "login", f"rate/{agent}", f"ratings/{agent}", f"policies/{agent}", f"offer#{offered}")
    assert {page_at(path) for path in paths} == pages_of("feedback")
    for path in paths:
        page.goto(f"{service.url}/{path}")
        if path.startswith("rate/"):
            introduce(page, "Ann")
            page.get_by_role("button", name="2 Weak").first.click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        if path.startswith("offer"):
            expect(page.get_by_text("Ask people")).to_be_visible()
        assert page.evaluate("document.documentElement.lang") == "en-US"
        faults += violations(page)
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
        faults += violations(page)
        if path.startswith("rate/"):
            first, second = (
                page.get_by_role("group", name="Grade of answer a"),
                page.get_by_role("group", name="Grade of answer b"),
            )
            above, below = first.bounding_box(), second.bounding_box()
            assert above is not None and below is not None and above["y"] < below["y"] < 800 - below["height"]
        keep(page, f"phone-{re.split('[/#]', path)[0]}-{scheme}")
        page.set_viewport_size({"width": 1100, "height": 640})
    assert faults == []


@pytest.mark.slow
def test_two_raters_never_hold_the_same_item(
    service: FeedbackService, api: httpx.Client, browser: Browser, refused: list[str]
) -> None:
    for n in (1, 2):
        add_item(api, "two", f"Prompt number {n}", "Yes.", raters=2)
    ann, bob = open_page(browser, refused), open_page(browser, refused)
    for rater, number in ((ann, 1), (bob, 2)):
        rater.goto(f"{service.url}/rate/two")
        introduce(rater, f"Rater {number}")
        expect(rater.get_by_text(f"Prompt number {number}")).to_be_visible()
    cleo = open_page(browser, refused)
    cleo.goto(f"{service.url}/rate/two")
    introduce(cleo, "Cleo")
    expect(cleo.get_by_text("Other people hold the rest: 2 of the waiting answers")).to_be_visible()
    cleo.context.close()
    for rater, grade in ((ann, "5"), (bob, "4")):
        rater.keyboard.press(grade)
        expect(rater.get_by_role("button", name="Next (Enter)")).to_be_enabled()
    for rater in (ann, bob):
        rater.keyboard.press("Enter")
    for rater in (ann, bob):
        shown = rater.get_by_text(re.compile("Nothing to rate now|Prompt number")).filter(visible=True)
        expect(shown).to_be_visible()
    deadline = time.monotonic() + 60
    while api.get("/two/agreement").json()["answers"] < 2:
        assert time.monotonic() < deadline
        for rater, grade in ((ann, "1"), (bob, "2")):
            if rater.get_by_text("Nothing to rate now").is_visible():
                rater.get_by_role("button", name="Look again").click()
            else:
                rater.keyboard.press(grade)
                rater.wait_for_timeout(400)
                rater.keyboard.press("Enter")
            rater.wait_for_timeout(600)
    found = api.get("/two/agreement").json()
    assert (found["raters"], found["answers"]) == (2, 2) and found["krippendorffAlpha"] < 1
    for rater in (ann, bob):
        rater.context.close()


@pytest.mark.slow
def test_training_deploying_and_rolling_back(service: FeedbackService, api: httpx.Client, page: Page) -> None:
    api.post("/feedback/shop", json=scores(6))
    page.goto(f"{service.url}/policies/shop")
    expect(page.get_by_text("4 are missing")).to_be_visible()
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.get_by_text("training needs 10")).to_be_visible()
    api.post("/feedback/shop", json=scores(34, 6))
    assert api.post("/train_policy/shop", json=QUICK | {"maxSteps": 12}).status_code == 200
    typed = page.get_by_label("v40 %", exact=True)
    typed.fill("30")
    api.post("/train_policy/shop", json=QUICK | {"maxSteps": 5000}, headers={"Prefer": "respond-async"})
    with pressing(page.get_by_role("button", name="Cancel")):
        for step in (1, 2):
            expect(page.get_by_text(re.compile(rf"v40.1: training the policy, step [{step}-9]"))).to_be_visible(
                timeout=PATIENCE_MS
            )
    expect(page.get_by_text("The last training was cancelled.")).to_be_visible()
    typed.focus()
    begun = api.post("/train_policy/shop", json=QUICK | {"maxSteps": 12}, headers={"Prefer": "respond-async"})
    expect(page.get_by_text("v40.1: training")).to_be_visible()
    with api.stream("GET", f"/jobs/{begun.json()['id']}/events") as stream:
        assert "event: end" in list(stream.iter_lines())
    expect(page.get_by_text("The last training made v40.1.")).to_be_visible()
    expect(page.get_by_label("v40.1 %", exact=True)).to_be_visible()
    expect(typed).to_be_focused()
    expect(typed).to_have_value("30")
    api.put("/shop/deployment", json={"v40.1": 1.0})  # somebody else
    expect(page.get_by_text("Answers come from: v40.1 100%")).to_be_visible()
    expect(page.get_by_label("v40.1 %", exact=True)).to_have_value("100")
    expect(typed).to_have_value("30")
    for version, share in (("base", "0"), ("v40", "50"), ("v40.1", "50")):
        page.get_by_label(f"{version} %", exact=True).fill(share)
    page.get_by_role("button", name="Deploy", exact=True).click()
    expect(page.get_by_text("Answers come from: v40 50%, v40.1 50%")).to_be_visible()
    rng = np.random.default_rng(0)
    for user in range(60):
        answer = api.post("/shop/generate", json={"prompt": "Say 1", "userId": f"u{user}", "maxNewTokens": 4}).json()
        score = float(rng.choice([0.75, 1.0] if answer["version"] == "v40.1" else [0.0, 0.25]))
        body = {"prompt": "Say 1", "response": answer["response"], "score": score, "runId": answer["runId"]}
        assert api.post("/feedback/shop", json=body).status_code == 201
    expect(page.get_by_text("v40.1 is better than v40.")).to_be_visible()
    expect(page.get_by_text(re.compile(r"Reward model on \d+ held-out ratings: correlation"))).to_be_visible(
        timeout=PATIENCE_MS
    )
    expect(page.get_by_text("by people, of")).to_be_visible()
    expect(page.get_by_role("heading", name="Answers before and after")).to_be_visible()
    expect(page.get_by_text("v40.1 is newer")).to_be_visible()  # the report is not changed by itself
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        expect(page.locator(f"body.body--{scheme}")).to_be_visible()
        assert violations(page) == []
        measured = chart_contrasts(page)
        assert {(each.chart, each.kind) for each in measured} >= {
            (chart, kind) for chart in CHARTS for kind in ("text", "shape")
        }
        assert [each for each in measured if each.too_low] == [], scheme
    page.emulate_media(color_scheme="light")
    keep(page, "feedback-policies")
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400, "the table of versions scrolls by itself"
    page.set_viewport_size({"width": 1100, "height": 640})
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_text("Answers come from: v40 100%")).to_be_visible()
    expect(typed).to_have_value("100")
    assert api.get("/shop/deployment").json()["weights"] == {"v40": 1.0}


def test_keys_are_asked_for(server: Server, tmp_path: Path, page: Page) -> None:
    with FeedbackService(tmp_path, "tiny", "--service", server.address) as service:
        rater = run_keys(service, "create", "ann", "--role", "rate")
        page.goto(f"{service.url}/rate/bot")
        page.wait_for_url("**/login?next=*")
        page.get_by_label("API key").fill("gwf_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("This key is not valid.")).to_be_visible()
        page.get_by_label("API key").fill(rater)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/rate/bot")
        expect(page.get_by_text("Nothing to rate now")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/login")
        page.goto(f"{service.url}/rate/bot")
        page.get_by_label("API key").fill(rater)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/rate/bot")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/login")
        page.goto(f"{service.url}/offer#behind")
        page.get_by_label("API key").fill(rater)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("has the role rate; this page needs train")).to_be_visible()
        assert page.url == f"{service.url}/offer#behind"
        page.goto(f"{service.url}/policies/bot")
        expect(page.get_by_text("has the role rate; this page needs read")).to_be_visible()
        run_keys(service, "revoke", "ann")
        page.goto(f"{service.url}/rate/bot")
        page.wait_for_url("**/login?next=*")
