"""The console in a real browser, over a real server."""

from __future__ import annotations

import asyncio
import html
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import indent
from typing import Any

import gradwire
import httpx
import pytest
import yaml
from gradwire import sync
from gradwire.rl.rewards.graders import grader_of
from gradwire_console.recipe_fields import GRADERS
from playwright.sync_api import Browser, Page, expect
from support.axe import page_at, pages_of, violations
from support.chats import chat_model
from support.console import Console, page_of
from support.server import Server
from support.tinker import HttpServer

pytestmark = [pytest.mark.long, pytest.mark.browser]

ROWS = {"input_ids": [[5, 6, 7, 8, 9, 10]] * 2}
UPGRADE = {
    "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
    "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
}  # fmt: skip
TICKS = """async (plot, name) => {
  const { echarts } = await import("nicegui-echart");
  const axis = echarts.getInstanceByDom(plot).getModel().getComponent(name).axis;
  return axis.getViewLabels().map((each) => each.formattedLabel);
}"""
PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "{{constructor.constructor('alert(3)')()}}",
    '"><svg onload=alert(4)>',
)


def train(run: sync.TrainingClient, steps: int, learning_rate: float = 1e-3) -> None:
    for _ in range(steps):
        run.forward_backward(ROWS, "causal_lm")
        run.optim_step(learning_rate=learning_rate).result(60)


def row(page: Page, run: sync.TrainingClient) -> Any:
    return page.locator(f'tr[data-key="{run.run_id}"]')


def test_a_run_appears_trains_and_is_found(console: Console, service: sync.ServiceClient, page: Page) -> None:
    page.goto(console.url)
    run = service.create_run("tiny", lora={"rank": 2}, name="seen-live")
    expect(row(page, run)).to_contain_text("seen-live")
    train(run, 2)
    expect(row(page, run)).to_contain_text("training")
    expect(row(page, run).locator("td").nth(3)).to_have_text("2")
    page.keyboard.press("/")
    page.keyboard.type("nothing like it")
    expect(page.get_by_text("Nothing matches")).to_be_visible()
    page.get_by_role("searchbox").fill("seen-live")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/run/{run.run_id}")
    last = page.locator(".gw-plotted", has_text="loss").locator(".mono").first
    expect(last).not_to_have_text("")
    train(run, 1)
    expect(page.get_by_role("region", name="Operations").locator("tbody tr")).to_have_count(6)
    expect(page.locator(".gw-facts").first).to_contain_text("3")
    page.keyboard.press("?")
    expect(page.get_by_text("next and previous row")).to_be_visible()
    found = page.request.get(f"{console.url}/api/runs/{run.run_id}/metrics").json()
    assert len(found["loss"]) == 3 and len(found["learning_rate"]) == 3


def test_a_plot_is_zoomed_by_dragging(console: Console, service: sync.ServiceClient, page: Page) -> None:
    run = service.create_run("tiny", lora={"rank": 2}, name="zoomed")
    train(run, 4)
    page.goto(f"{console.url}/run/{run.run_id}")
    plot, whole = page.get_by_role("img", name="loss", exact=True), page.get_by_role("button", name="Show all")
    operations = page.get_by_role("region", name="Operations").locator("tbody tr")
    for turn in range(2):  # also when it was drawn anew
        box = plot.locator("canvas").bounding_box()
        assert box is not None
        expect(whole).to_be_hidden()
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.5 * box["height"], steps=4)
        page.mouse.up()
        expect(whole).to_be_visible()
        plot.dblclick()
        expect(whole).to_be_hidden()
        train(run, 1)
        expect(operations).to_have_count(10 + 2 * turn)


def test_ticks_of_huge_and_tiny_values_are_short(console: Console, service: sync.ServiceClient, page: Page) -> None:
    plot = page.get_by_role("img", name="learning_rate", exact=True)
    for last, tick in ((0.0, ""), (1e30, "1.2e+30"), (9e-7, "6e-7"), (1e-7, "1e-7")):
        run = service.create_run("tiny", lora={"rank": 2})
        train(run, 1, 1e-7)
        if tick:
            train(run, 1, last)
        page.goto(f"{console.url}/run/{run.run_id}")
        expect(plot.locator("canvas")).to_be_attached()
        places, ticks = (plot.evaluate(TICKS, axis) for axis in ("xAxis", "yAxis"))
        if not tick:
            assert places == ["0", "1", "2"], "a lone point is in the middle"
            continue
        assert tick in ticks and max(map(len, ticks)) <= len("1.2e+30"), ticks
        assert places[-1] == "2"
    page.get_by_label("Axis").click()
    page.get_by_role("option", name="Time").click()
    page.wait_for_function(
        f"async (plot) => !(await ({TICKS})(plot, 'xAxis')).includes('2')", arg=plot.element_handle()
    )
    assert all("e+" not in each for each in plot.evaluate(TICKS, "xAxis"))


def test_mistyped_addresses_are_answered_by_a_page(console: Console, service: sync.ServiceClient, page: Page) -> None:
    run = service.create_run("tiny", lora={"rank": 2}, name="mistyped")
    here = f"run/{run.run_id}"
    for path, status, said in (
        ("nowhere", 404, "Nothing is at /nowhere"),
        (f"{here}/batches/2", 404, "the menu has what there is"),
        (f"{here}/batches?n=abc", 422, "n in the address is 'abc'"),
        (f"{here}/rollouts?n=1.5", 422, "n in the address is '1.5'"),
        ("playground?temperature=warm&chat=perhaps", 422, "temperature in the address is 'warm'"),
        ("playground?temperature=nan", 422, "temperature in the address is 'nan'"),
        ("playground?top_p=inf", 422, "top_p in the address is 'inf'"),
        (f"{here}/batches?n=-4&page=-9", 200, ""),
        (f"{here}/batches?n={10**30}", 200, ""),
        (f"{here}/rollouts?n={10**30}", 200, "No rollouts of this run"),
        ("run/%00", 200, "There is no such run"),
        ("jobs/none", 200, "none"),
    ):
        if status != 200:  # all that is said is in the HTML
            response = page.request.get(f"{console.url}/{path}")
            shown = html.unescape(response.text())
            assert response.status == status and said in shown and "<h1" in shown and "Playground</a>" in shown, path
            continue
        page.goto(f"{console.url}/{path}")
        expect(page.locator(".gw-main").get_by_text(said).first if said else page.get_by_role("alert")).to_be_visible()
    for path, status in (
        ("api/nothing", 404),
        (f"api/{here}s/x", 404),
        (f"api/runs/{run.run_id}/metrics?smooth=a", 422),
    ):
        answer = page.request.get(f"{console.url}/{path}")
        assert answer.status == status and answer.json()["detail"]
    train(run, 2)
    smooth = f"{console.url}/api/runs/{run.run_id}/metrics?smooth="
    means = [page.request.get(f"{smooth}{window}").json()["loss"] for window in (2, 10**40)]
    assert len(means[0]) == 2 and means[0] == means[1], "the mean of all"


def test_actions_show_their_line_and_are_carried_out(console: Console, service: sync.ServiceClient, page: Page) -> None:
    run = service.create_run("tiny", lora={"rank": 2}, name="acted-on")
    train(run, 1)
    run.save_checkpoint("kept", note="a note").result(60)
    page.goto(f"{console.url}/run/{run.run_id}")
    dialog = page.get_by_role("dialog")
    kept = page.get_by_role("button", name="Fork kept")
    expect(page.locator(".gw-facts").first).to_contain_text("Newest checkpoint")
    kept.hover()
    page.mouse.down()
    while not kept.evaluate("each => each.matches(':active')"):  # the page moved under the pointer before
        page.mouse.up()
        kept.hover()
        page.mouse.down()
    run.save_checkpoint("newer").result(60)  # which pushes it down
    expect(page.get_by_role("button", name="Fork newer")).to_be_visible()
    page.mouse.up()
    expect(dialog).to_contain_text(f'await service.fork_run("{run.run_id}/kept")')
    dialog.get_by_role("button", name="Fork", exact=True).click()
    page.wait_for_url(lambda url: "/run/" in url and run.run_id not in url)
    expect(page.get_by_text(f"{run.run_id}/kept")).to_be_visible()
    forked = page.url.rpartition("/")[2]
    page.get_by_role("button", name="Delete").click()
    dialog.get_by_role("textbox").fill("another name")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("Type fork of kept to confirm.")).to_be_visible()
    assert forked in {each.run_id for each in service.list_runs()}
    dialog.get_by_role("textbox").fill("fork of kept")
    dialog.get_by_role("button", name="Delete").click()
    page.wait_for_url(console.url + "/")
    assert forked not in {each.run_id for each in service.list_runs()}


def test_a_checkpoint_shows_what_its_weights_measured(
    console: Console, service: sync.ServiceClient, page: Page
) -> None:
    run = service.create_run("tiny", lora={"rank": 2}, name="measured")
    held_out = run.forward(ROWS, "causal_lm").result(60).loss
    train(run, 1)
    run.save_checkpoint("first").result(60)
    loss = run.forward_backward(ROWS, "causal_lm").result(60).loss
    run.optim_step(learning_rate=1e30).result(60)
    for _ in range(2):
        run.forward_backward(ROWS, "causal_lm", on_nonfinite="skip").result(60)
        run.optim_step(on_nonfinite="skip").result(60)
    run.save_checkpoint("broken").result(60)
    page.goto(f"{console.url}/run/{run.run_id}/checkpoints")
    rows = page.get_by_role("region", name="Checkpoints").locator("tbody tr")
    expect(rows.nth(0).locator("td").nth(3)).to_have_text("nan at step 3")
    expect(rows.nth(1).locator("td").nth(3)).to_have_text(f"{loss:.4g}")
    for each in (0, 1):
        expect(rows.nth(each).locator("td").nth(4)).to_have_text(f"{held_out:.4g} at step 0")
    run.forward(ROWS, "causal_lm").result(60)
    expect(rows.nth(0).locator("td").nth(4)).to_have_text("nan")
    page.goto(f"{console.url}/run/{run.run_id}")
    expect(page.get_by_text("loss nan at step 3, loss (forward only) nan")).to_be_visible()
    page.goto(f"{console.url}/compare?runs={run.run_id}")
    figures = page.get_by_role("region", name="Last figures").locator("tbody tr")
    expect(figures.filter(has_text=re.compile("^ *loss")).first).to_contain_text("nan")


def test_strings_of_runs_and_models_are_texts(console: Console, service: sync.ServiceClient, page: Page) -> None:
    runs = [service.create_run("tiny", lora={"rank": 2}, name=each, tags={each: each}) for each in PAYLOADS]
    train(runs[0], 1)
    runs[0].save_checkpoint("x", note=PAYLOADS[0]).result(60)
    page.goto(console.url)
    for run, payload in zip(runs, PAYLOADS):
        expect(row(page, run)).to_contain_text(payload)
    page.goto(f"{console.url}/run/{runs[0].run_id}")
    expect(page.get_by_role("heading", level=1)).to_have_text(PAYLOADS[0])
    expect(page.get_by_text(f"old, {PAYLOADS[0]}")).to_be_visible()
    page.goto(f"{console.url}/compare?runs=" + ",".join(run.run_id for run in runs))
    expect(page.get_by_role("region", name="Settings that differ")).to_contain_text(f"tag {PAYLOADS[1]}")
    page.goto(f"{console.url}/playground?prompt={PAYLOADS[0]}&tokens=3&temperature=0&top_p=0.5&seed=7")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".gw-answer span").nth(2)).to_be_attached()
    answer = page.locator(".gw-answer").inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the link").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    page.goto(page.evaluate("navigator.clipboard.readText()"))
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".gw-answer span")).to_have_count(3)
    assert page.locator(".gw-answer").inner_text() == answer, "a link has the settings too"
    expect(page.locator(".gw-main img, .gw-main svg[onload]")).to_have_count(0)


@pytest.mark.slow
def test_the_playgrounds_lines_do_what_the_page_did(tmp_path: Path, page: Page) -> None:
    """Of two models, as a chat of two turns, with all settings."""
    model = chat_model(tmp_path / "model", "qwen")
    with (
        Server(model, tmp_path / "state", "--model", f"other={model}") as server,
        Console(server.address) as console,
    ):
        asked = "models=tiny,other&prompt=what+is+one&chat=true&tokens=5&temperature=0.7&top_p=0.9&seed=3"
        page.goto(f"{console.url}/playground?{asked}")
        answers = page.locator(".gw-answer")
        for turn, question in enumerate(("", "what is two")):
            if question:
                expect(page.get_by_label("Prompt")).to_have_value("")
                page.get_by_label("Prompt").fill(question)
            page.get_by_role("button", name="Generate").click()
            expect(answers).to_have_count(2 * turn + 2)
            code = page.locator(".gw-sdk code").inner_text()
            expect(page.locator(".gw-answer.waits")).to_have_count(0)
            newest = [answers.nth((turn + 1) * (n + 1) - 1) for n in range(2)]
            assert all(each.locator("span").count() == 5 for each in newest)
            assert executed(code, server.address).split() == " ".join(each.inner_text() for each in newest).split()
        assert "'assistant'" in code, "the conversation goes on"
        page.get_by_role("button", name="New chat").click()
        expect(answers).to_have_count(0)


def executed(code: str, address: str) -> str:
    """What lines of the console print."""
    scope: dict[str, Any] = {}
    exec("async def main(service):\n" + indent(code, "    "), scope)

    async def main() -> None:
        async with gradwire.connect(address) as service:
            await scope["main"](service)

    with redirect_stdout(StringIO()) as printed, ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, main()).result()  # the browser's driver has a loop in this thread
    return printed.getvalue()


def test_a_read_only_console_changes_nothing(server: Server, service: sync.ServiceClient, page: Page) -> None:
    run = service.create_run("tiny", lora={"rank": 2}, name="untouched")
    train(run, 1)
    run.save_checkpoint("kept").result(60)
    before = {each.run_id for each in service.list_runs()}, [each.name for each in run.list_checkpoints()]
    with Console(server.address, "--read-only") as console:
        page.goto(f"{console.url}/run/{run.run_id}")
        expect(page.get_by_role("button", name="Try kept")).to_be_visible()
        for name in ("Fork kept", "Save checkpoint", "Export", "Delete"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        assert before == ({each.run_id for each in service.list_runs()}, [each.name for each in run.list_checkpoints()])
        stranger = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert page.request.get(console.url, headers=stranger).status == 421
        policies = [page.request.get(console.url).headers["content-security-policy"] for _ in range(2)]
        scripts = [next(each for each in policy.split("; ") if each.startswith("script-src")) for policy in policies]
        assert "'unsafe-inline'" not in scripts[0] and "'nonce-" in scripts[0] and scripts[0] != scripts[1]


@pytest.mark.slow
def test_hand_made_requests_are_refused(server: Server) -> None:
    with Console(server.address, "--host-name", "lab.example") as console, httpx.Client(base_url=console.url) as http:
        for host, status in (("evil.example", 421), ("127.0.0.1.evil.example", 421), ("lab.example", 200)):
            assert http.get("/api/runs", headers={"host": host}).status_code == status
        for foreign in (
            {"origin": "http://127.0.0.1:9"}, {"origin": "null"}, {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        ):  # fmt: skip
            assert http.get("/api/runs", headers=foreign).status_code == 403
            for headers in (foreign, UPGRADE | foreign):
                assert http.get("/_nicegui_ws/socket.io/?EIO=4", headers=headers).status_code == 403
        assert http.get("/api/runs", headers={"x-long": "a" * 300_000}).status_code == 431


def test_keys_of_the_server_are_asked_for(tiny_model_path: Path, tmp_path: Path, page: Page) -> None:
    from gradwire_server.access.key_file import KeyFile

    tmp_path.joinpath("state").mkdir()
    keys = {name: KeyFile(tmp_path / "state").create(name, "user") for name in ("ada", "bob")}
    with (
        Server(tiny_model_path, tmp_path / "state") as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address, api_key=keys["ada"]) as service,
    ):
        run = service.create_run("tiny", lora={"rank": 2}, name="of-ada")
        assert page.request.get(f"{console.url}/api/runs").status == 401
        named = page.request.get(f"{console.url}/api/runs", headers={"host": "lab.example"})
        assert named.status == 401, "a proxy may pass on the name that it is asked by"
        page.goto(f"{console.url}/run/{run.run_id}")
        page.wait_for_url("**/login?next=*")
        for key, sees in (("gw_wrong", "does not know this key"), (keys["bob"], "There is no such run")):
            page.get_by_label("Key of the server").fill(key)
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_text(sees)).to_be_visible()
        assert page.request.get(f"{console.url}/api/runs").json() == []
        with httpx.Client(base_url=console.url) as plain:  # without a script
            assert plain.post("/login", data={"key": "a" * 20_000}).status_code == 413
            assert plain.post("/login?next=//evil.example", data={"key": keys["ada"]}).headers["location"] == "/"
            assert plain.get("/api/runs").json()[0]["name"] == "of-ada"
        page.context.clear_cookies()
        page.goto(console.url)
        page.get_by_label("Key of the server").fill(keys["ada"])
        page.keyboard.press("Enter")
        expect(row(page, run)).to_contain_text("of-ada")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/login")
        assert page.request.get(f"{console.url}/api/runs").status == 401
        page.get_by_label("Key of the server").fill(keys["ada"])
        page.keyboard.press("Enter")
        expect(row(page, run)).to_contain_text("of-ada")
        page.wait_for_timeout(1500)  # longer than a console trusts a key without asking
        KeyFile(tmp_path / "state").revoke("ada")
        page.reload()
        page.wait_for_url("**/login?next=*")
        page.get_by_label("Key of the server").fill(keys["bob"])
        page.keyboard.press("Enter")
        expect(page.get_by_text("No run yet.")).to_be_visible()
        server.end()
        expect(page.locator(".gw-state.away")).to_be_visible()
        expect(page.get_by_text("The server is away: what is shown here is")).to_be_visible()


@pytest.mark.slow
def test_a_console_waits_for_its_server(tiny_model_path: Path, tmp_path: Path, page: Page) -> None:
    address = f"127.0.0.1:{_port()}"
    with ThreadPoolExecutor(1) as thread:
        console = Console(address)
        begun = thread.submit(console.__enter__)
        with pytest.raises(TimeoutError):
            begun.result(12)  # longer than it tries to connect at once
        with Server(tiny_model_path, tmp_path / "state", "--address", address):
            begun.result(60)
            page.goto(console.url)
            expect(page.get_by_text("No run yet.")).to_be_visible()
            console.__exit__(None, None, None)


@pytest.mark.slow
def test_a_restarted_server_is_found_again(tiny_model_path: Path, tmp_path: Path, page: Page) -> None:
    with (
        Server(tiny_model_path, tmp_path / "state", "--address", f"127.0.0.1:{_port()}") as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
    ):
        run = service.create_run("tiny", lora={"rank": 2}, name="survivor")
        train(run, 1)
        page.goto(f"{console.url}/run/{run.run_id}")
        here = f"run/{run.run_id}"
        others = ["", "server", "timeline", "jobs", "playground", f"compare?runs={run.run_id}", f"{here}/checkpoints"]
        pages = [page, *(page.context.new_page() for _ in range(len(others) + 1))]
        for each, path in zip(pages[1:], [*others, f"{here}/journal"], strict=True):
            each.goto(f"{console.url}/{path}")
        for each in pages:
            expect(each.locator(".gw-server .gw-state.connected")).to_be_visible()
        server.end(signal.SIGKILL)
        for each in pages:
            expect(each.locator(".gw-server .gw-state.away")).to_be_visible()
        server.start()
        for each in pages:
            expect(each.locator(".gw-server .gw-state.connected")).to_be_visible()
            expect(each.locator(".gw-error").filter(visible=True)).to_have_count(0)
            expect(each.get_by_text("what is shown here is")).to_be_hidden()
        train(run, 3)
        expect(pages[-1].get_by_role("region", name="Operations").locator("tbody tr")).not_to_have_count(0)
        expect(page.get_by_role("region", name="Operations").locator("tbody tr")).to_have_count(8)


@pytest.mark.slow
def test_a_server_that_hangs_is_away(tiny_model_path: Path, tmp_path: Path, page: Page) -> None:
    """Its connections stay, as its machine keeps them."""
    with (
        Server(tiny_model_path, tmp_path / "state") as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
    ):
        run = service.create_run("tiny", lora={"rank": 2}, name="frozen")
        train(run, 1)
        page.goto(f"{console.url}/run/{run.run_id}")
        expect(page.locator(".gw-state.connected")).to_be_visible()
        server.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        expect(page.locator(".gw-note", has_text="The server is away: what is shown here is")).to_be_visible()
        assert time.monotonic() - begun < 20
        others = [page.context.new_page() for _ in range(2)]
        begun = time.monotonic()
        for each, path in zip(others, ("", f"run/{run.run_id}/checkpoints")):
            each.goto(f"{console.url}/{path}")
            expect(each.locator(".gw-note", has_text="The server is away")).to_be_visible()
        assert time.monotonic() - begun < 20, "other pages do not hang with it"
        answer = page.request.get(f"{console.url}/api/runs")
        assert answer.status == 503 and "the server is away" in answer.json()["detail"]
        server.process.send_signal(signal.SIGCONT)
        for each in (page, *others):
            expect(each.locator(".gw-state.connected")).to_be_visible()
            expect(each.get_by_text("what is shown here is")).to_be_hidden()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_in_the_way_of_assistive_technology(
    tiny_model_path: Path, tmp_path: Path, browser: Browser, scheme: Any
) -> None:
    """On all pages, at three widths."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(12)))
    with (
        HttpServer(tiny_model_path, tmp_path / "state", _port(), "--job-workers", "1") as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
        page_of(browser) as page,
    ):
        settings = {"model": "tiny", "data": service.files.upload(data).file_id, "max_tokens": 64, "max_steps": 2}
        job = service.jobs.submit("sft", settings, name="axe").job_id
        session = service.rollout_session("tiny", name="axe").session_id
        runs = [
            service.create_run("tiny", lora={"rank": rank}, name=f"axe-{rank}", record_batches=1.0) for rank in (1, 2)
        ]
        train(runs[0], 2)
        runs[0].save_checkpoint("kept").result(60)
        runs[0].record_rollouts(1, [{"group": 0, "member": n, "reward": n, "steps": []} for n in range(3)])
        service.jobs.wait(job, 60)
        here = f"run/{runs[0].run_id}"
        paths = {
            "": "", here: "Delete", f"compare?runs={runs[0].run_id},{runs[1].run_id}": "", "jobs": "New training",
            f"jobs/{job}": "", "playground?prompt=one&tokens=3": "Generate", "run/none": "", "timeline": "",
            "server": "", "uploads": "", "ratings": "", "audit": "", "sessions": "", f"sessions/{session}": "",
            "login": "", f"{here}/batches": "", f"{here}/batches?n=1": "", f"{here}/rollouts": "",
            f"{here}/journal": "", f"{here}/checkpoints": "Save checkpoint",
        }  # fmt: skip
        assert {page_at(path) for path in paths} == pages_of("console")
        page.emulate_media(color_scheme=scheme)
        found = []
        for path, opened in paths.items():
            page.goto(f"{console.url}/{path}")
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            if opened:
                page.get_by_role("button", name=opened).click()
            found += violations(page)
            for width in (400, 2560):
                page.set_viewport_size({"width": width, "height": 800})
                page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")  # charts follow
                found += violations(page) if width == 400 else []
            page.set_viewport_size({"width": 1280, "height": 800})
        assert found == []


def _port() -> int:
    from support.server import free_port

    return free_port()


def test_the_graders_that_the_form_offers_are_valid() -> None:
    for text in GRADERS:
        grader_of(yaml.safe_load(text))


def _choose(page: Page, field: str, option: str) -> None:
    page.get_by_label(field, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()


@pytest.mark.slow
def test_a_job_is_started_from_its_form(tiny_model_path: Path, tmp_path: Path, page: Page) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(12)))
    with (
        Server(tiny_model_path, tmp_path / "state", "--job-workers", "1") as server,
        Console(server.address) as console,
    ):
        page.goto(f"{console.url}/jobs")
        page.get_by_role("button", name="New training").click()
        page.locator("input[type=file]").set_input_files(data)
        expect(page.get_by_text("The file is on the server.")).to_be_visible()
        rows = page.get_by_role("region", name="First rows")
        expect(rows.locator(".gw-tokens")).to_have_count(3)
        expect(rows.locator(".gw-tokens").first).to_contain_text("say 0")
        expect(rows.locator("mark").first).to_have_text(re.compile(r"^ 0"))
        expect(page.get_by_text("LoRA of rank 16. Steps: 1: 1 × 12 rows, 16 a step")).to_be_visible()
        page.get_by_text("Advanced").click()
        steps, rate = (page.get_by_label(name, exact=True) for name in ("max steps", "learning rate"))
        expect(steps).to_have_attribute("placeholder", "1: 1 × 12 rows, 16 a step")
        expect(rate).to_have_attribute("placeholder", re.compile("by the model's width"))
        page.get_by_label("label smoothing").wait_for()  # of the loss
        _choose(page, "Recipe", "grpo")
        _choose(page, "grading", "1 for a text with the row's answer in it")
        expect(page.get_by_text("Learning rate:")).to_be_visible()
        page.get_by_label("grading", exact=True).fill("{type: bad}")
        page.keyboard.press("Enter")
        expect(page.get_by_text("grading: type is 'bad'; it must be one of string_check")).to_be_visible()
        _choose(page, "Recipe", "sft")
        steps.fill("two")
        page.get_by_role("button", name="Start the training").click()
        expect(page.get_by_text("max_steps is 'two'; it must be a whole number").first).to_be_visible()
        for name, value in (("max steps", "2"), ("batch size", "2"), ("max tokens", "64"), ("Name", "from-the-form")):
            page.get_by_label(name, exact=True).fill(value)
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_text("by the time of one step")).to_be_visible()
        page.get_by_role("button", name="Start the training").click()
        expect(page.get_by_role("dialog")).to_contain_text('service.jobs.submit("sft"')
        page.get_by_role("dialog").get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/jobs/*job-*")
        expect(page.locator("h1 + div .gw-state")).to_have_text(re.compile("succeeded"))
        expect(page.locator(".gw-plot-title", has_text="loss").first).to_be_visible()
        events = page.get_by_role("region", name="Events")
        expect(events).to_contain_text(re.compile(r"\d (s|min) ago"))
        page.get_by_role("link", name="Its run").click()
        page.get_by_role("link", name="Its job").click()
        expect(page.get_by_text("2 of 2 steps")).to_be_visible()
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("textbox").fill("from-the-form")
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        page.wait_for_url("**/jobs")
        expect(page.get_by_text("No job yet.")).to_be_visible()
        with gradwire.sync.connect(server.address) as service:
            file = next(each for each in service.files.list() if each.purpose == "fine-tune")
            settings = {"model": "tiny", "data": file.file_id, "init_from": "run-none/none", "max_steps": 1}
            job = service.jobs.wait(service.jobs.submit("sft", settings, name="fails").job_id, 60)
        page.goto(f"{console.url}/jobs/{job.job_id}")
        expect(page.get_by_role("alert")).to_have_count(1)
        expect(page.get_by_role("alert")).to_contain_text(job.error)
        expect(events).to_contain_text("ago")
        expect(events).not_to_contain_text(job.error)
