"""The list of runs: figures, order, filters, groups, and an address that has all of it; few rows of many."""

from __future__ import annotations

import re
from collections.abc import Iterator

import gradwire
import pytest
from gradwire import sync
from playwright.sync_api import Browser, Page, Route, expect
from support.console import Console
from support.server import Server

pytestmark = [pytest.mark.long, pytest.mark.browser]

ROWS = {"input_ids": [[5, 6, 7, 8, 9, 10]] * 2}
RATES = {"cold": 1e-5, "warm": 1e-3, "hot": 1e-1}
MANY = 500


@pytest.fixture(scope="module")
def trained(server: Server) -> Iterator[tuple[Console, dict[str, sync.TrainingClient]]]:
    """Three runs of different rates, of which the first two are one sweep's."""
    with gradwire.sync.connect(server.address) as service, Console(server.address) as console:
        runs = {}
        for name, rate in RATES.items():
            tags = {"sweep": "rates"} if name != "hot" else {}
            runs[name] = service.create_run("tiny", lora={"rank": 2}, name=name, tags={"heat": f"{rate:g}"} | tags)
            for _ in range(3):
                runs[name].forward_backward(ROWS, "causal_lm")
                runs[name].optim_step(learning_rate=rate).result(60)
        yield console, runs


def names(page: Page) -> list[str]:
    return page.locator("tbody tr[data-key] td:nth-child(2) a").all_inner_texts()


def test_runs_are_ordered_filtered_and_grouped_by_what_they_measured(
    trained: tuple[Console, dict[str, sync.TrainingClient]], page: Page
) -> None:
    console, runs = trained
    losses = {name: run.history()["loss"][-2] for name, run in runs.items()}
    by_loss = sorted(losses, key=lambda name: losses[name], reverse=True)
    page.goto(console.url)
    row = page.locator(f'tr[data-key="{runs["hot"].run_id}"]')
    expect(row).to_contain_text(f"{losses['hot']:.4g}")
    expect(row.locator(".gw-spark polyline")).to_have_attribute("points", re.compile(r"^0,\S+ 50,\S+ 100,\S+$"))
    expect(row).to_contain_text(" ago")
    page.get_by_role("searchbox").fill("heat=")  # other tests' runs are of the same server
    expect(page.locator("tbody tr[data-key]")).to_have_count(3)
    page.get_by_role("button", name="loss", exact=False).first.click()
    assert names(page) == by_loss
    page.get_by_role("searchbox").fill(f"loss<{losses[by_loss[0]] - 1e-6} state:idle heat=")
    expect(page.locator("tbody tr[data-key]")).to_have_count(2)
    assert names(page) == by_loss[1:]
    page.get_by_role("searchbox").fill("heat=")
    page.get_by_label("Group by").click()
    page.get_by_role("option", name="tag sweep").click()
    groups = page.locator("tr.group")
    expect(groups).to_have_count(2)
    mean = (losses["cold"] + losses["warm"]) / 2
    expect(groups.filter(has_text="sweep = rates")).to_contain_text(f"{mean:.4g}"[:6])
    page.get_by_label("select " + runs["cold"].run_id).check()
    page.get_by_label("Figures").click()
    page.get_by_role("option", name="grad_norm").click()
    page.keyboard.press("Escape")
    expect(page.locator("thead")).to_contain_text("grad_norm")
    page.wait_for_url(re.compile("figures="))  # the browser writes it after it has drawn
    page.goto(page.url)  # as someone does who was sent it
    expect(page.locator("thead")).to_contain_text("grad_norm")
    expect(groups).to_have_count(2)
    expect(page.get_by_label("select " + runs["cold"].run_id)).to_be_checked()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("loss")
    page.get_by_role("button", name=re.compile("sweep = rates")).click()
    expect(page.locator("tbody tr[data-key]")).to_have_count(1)


def test_a_link_to_curves_has_axis_mean_and_what_is_large(
    trained: tuple[Console, dict[str, sync.TrainingClient]], page: Page
) -> None:
    console, runs = trained
    page.goto(f"{console.url}/run/{runs['warm'].run_id}")
    large = page.locator(".gw-grid.large .gw-plot-title")
    expect(large.first).to_have_text("loss")
    page.get_by_role("button", name="Show grad_norm large").click()
    page.get_by_label("Axis").click()
    page.get_by_role("option", name="Tokens").click()
    page.get_by_label("Mean over").click()
    page.get_by_role("option", name="10 values").click()
    expect(page.get_by_text("Pale: each value.")).to_be_visible()
    page.wait_for_url(re.compile("mean=10"))
    page.goto(page.url)
    expect(large.last).to_have_text("grad_norm")
    expect(page.get_by_text("Pale: each value.")).to_be_visible()
    assert "axis=tokens" in page.url and "mean=10" in page.url
    for heading in ("Loss", "Speed"):
        expect(page.get_by_role("button", name=re.compile(f"{heading} · "))).to_be_visible()
    page.set_viewport_size({"width": 400, "height": 800})
    places = [page.get_by_role("heading", name=each, exact=True) for each in ("Now", "Checkpoints")]
    tops = [box["y"] for each in (*places, large.first) if (box := each.bounding_box())]
    assert len(tops) == 3 and tops == sorted(tops), "a phone begins with now"


def test_what_is_seen_first_needs_no_script(
    trained: tuple[Console, dict[str, sync.TrainingClient]], browser: Browser
) -> None:
    """Scripts are 830 kB, at 50 kB/s 17 seconds; rows and plots are to be seen in five, with half of the line."""
    console, runs = trained
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    sent: list[int] = []
    page.on("requestfinished", lambda request: sent.append(request.sizes()["responseBodySize"]))
    warm = page.locator(f'tr[data-key="{runs["warm"].run_id}"]')
    page.goto(console.url)
    expect(warm.locator("a")).to_have_text("warm")
    expect(page.get_by_role("columnheader", name="Tokens", exact=True)).to_be_visible()
    page.goto(f"{console.url}/?order=-Step")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    expect(warm).to_have_count(0)  # a script puts them in order
    sent.clear()
    page.goto(console.url)
    warm.locator("a").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("warm")
    expect(page.get_by_role("img", name="loss", exact=True).locator("polyline")).to_be_visible()
    expect(page.locator(".gw-facts").first).to_contain_text("3")
    two_pages = sum(sent)
    context.close()
    assert 0 < two_pages < 50_000 * 5 / 2, "what a browser waits for before it paints"


def test_the_page_made_by_scripts_takes_the_place_of_what_was_seen_first(
    trained: tuple[Console, dict[str, sync.TrainingClient]], page: Page
) -> None:
    console, runs = trained
    late: list[Route] = []
    page.route("**/index-*.js", lambda route: late.append(route))
    page.goto(f"{console.url}/run/{runs['warm'].run_id}")
    plot = page.get_by_role("img", name="loss", exact=True).first
    expect(plot.locator("polyline")).to_be_visible()
    expect(page.locator(".gw-before")).to_have_count(0)
    expect(page.get_by_role("button", name="Delete")).to_be_visible()
    page.get_by_role("button", name="Save checkpoint").click()  # plots are not waited for
    expect(page.get_by_role("dialog")).to_be_visible()
    for each in late:
        each.continue_()
    expect(plot.locator("canvas")).to_be_visible()
    expect(plot.locator("polyline")).to_have_count(0)


@pytest.mark.slow
def test_of_many_runs_only_those_in_the_window_are_in_the_page(
    server: Server, service: sync.ServiceClient, page: Page
) -> None:
    for number in range(MANY):
        service.create_run("tiny", lora={"rank": 1}, name=f"many {number}")
    with Console(server.address) as console:
        page.goto(console.url)
        expect(page.get_by_role("status").filter(has_text=re.compile(r"\d+ runs"))).to_be_visible()
        rows = page.locator("tbody tr[data-key]")
        expect(rows.first).to_contain_text(f"many {MANY - 1}")
        fits = 800 / 30 + 10
        assert rows.count() < fits
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(page.locator("tbody").get_by_text("many 0", exact=True)).to_be_visible()
        assert rows.count() < fits
        tops = page.evaluate(
            "[...document.querySelectorAll('tbody tr[data-key]')].map((each) => each.getBoundingClientRect())"
        )
        assert any(0 <= each["top"] < 800 for each in tops)
        for _ in range(3):
            page.keyboard.press("j")
        expect(page.locator("tr.at")).to_be_visible()
