"""What the console shows of a run's inside: recorded batches and rollouts, the journal, the timeline, a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradwire
import pytest
from gradwire import sync
from playwright.sync_api import Browser, Page, expect
from support.console import Console, page_of
from support.server import Server

pytestmark = [pytest.mark.long, pytest.mark.browser]

EVIL = "<img src=x onerror=alert(1)>"
GROUP: dict[str, Any] = {
    "prompt_ids": [[5, 6, 7]],
    "response_ids": [[[10, 11], [12, 13]]],
    "rewards": [[1.0, 0.0]],
    "sampler_log_probs": [[[-1.0, -2.0], [-3.0, -4.0]]],
}


def rollout(group: int, member: int, reward: float) -> dict[str, Any]:
    called = {"name": EVIL, "arguments": {"query": EVIL}, "content": EVIL, "error": ""}
    step = {
        "observation": EVIL,
        "action": f"answer {EVIL}",
        "reward": reward,
        "advantage": 0.5,
        "tool_results": [called],
    }
    about = {"task": f"task {group} {EVIL}", "reason": EVIL, "status": EVIL, "metrics": {EVIL: 1.0}}
    return {"group": group, "member": member, "reward": reward, "steps": [step]} | about


@pytest.fixture(scope="module")
def shown(server: Server) -> Iterator[tuple[Console, sync.TrainingClient]]:
    with Console(server.address) as console, gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora={"rank": 2}, name=f"inside {EVIL}", record_batches=1.0)
        run.forward_backward(GROUP, "grpo").result(60)
        run.optim_step().result(60)
        with pytest.raises(gradwire.InvalidBatchError):
            run.forward_backward({"input_ids": [[5, 6, 700_000]]}, "causal_lm").result(60)
        cut = rollout(1, 1, 0.5) | {"status": "completed"}
        cut["steps"][-1]["stop_reason"] = "length"
        run.record_rollouts(4, [rollout(0, 0, 1.0), rollout(0, 1, 0.0), rollout(1, 0, 0.5), cut])
        yield console, run


def test_a_batch_is_shown_token_by_token(shown: tuple[Console, sync.TrainingClient], page: Page) -> None:
    console, run = shown
    page.goto(f"{console.url}/run/{run.run_id}/batches")
    expect(page.get_by_text("1 batch", exact=True)).to_be_visible()
    page.get_by_role("link", name="forward_backward 1").click()
    tokens = page.locator(".gw-sequence", has_text="sample 2").locator(".gw-tokens span")
    expect(tokens).to_have_count(5)
    hint = tokens.nth(4).get_attribute("title") or ""
    assert "log-probability of the sampler -4.000" in hint and "ratio" in hint and "id 13" in hint
    expect(page.locator(".gw-sequence .unscored")).to_have_count(6)
    expect(page.get_by_text("recorded_batch(1)")).to_be_visible()
    page.goto(f"{console.url}/run/{run.run_id}/batches?n=99")
    expect(page.get_by_role("alert")).to_contain_text("no recording batch 99")


def test_a_group_of_answers_is_shown_with_its_rewards(shown: tuple[Console, sync.TrainingClient], page: Page) -> None:
    console, run = shown
    page.goto(f"{console.url}/run/{run.run_id}/rollouts")
    expect(page.get_by_text("2 groups, 1 without signal")).to_be_visible()
    expect(page.locator(".gw-bars i")).to_have_count(12)
    expect(page.locator(".gw-turn.tool").first).to_contain_text(EVIL)
    page.get_by_role("link", name="group 1").click()
    expect(page.get_by_text("this group gives no gradient")).to_be_visible()
    expect(page.get_by_role("region", name="Groups").locator("td").nth(4)).to_have_text("")
    expect(page.get_by_role("region", name="Groups").locator("tr").last.locator("td").nth(4)).to_have_text("1")
    expect(page.get_by_text("cut: its last turn reached max_tokens")).to_have_count(1)
    expect(page.get_by_text("completed", exact=True)).to_have_count(0)
    expect(page.locator(".gw-main img")).to_have_count(0)
    assert page.request.get(f"{console.url}/api/runs/{run.run_id}/rollouts/4").json()[3]["reward"] == 0.5
    for path, status in (
        (f"{run.run_id}/rollouts/5", 404),
        (f"{run.run_id}/rollouts/-1", 422),
        ("none/rollouts/4", 404),
    ):
        answer = page.request.get(f"{console.url}/api/runs/{path}")
        assert answer.status == status and answer.json()["detail"]


def test_the_journal_the_timeline_and_the_server_are_shown(
    shown: tuple[Console, sync.TrainingClient], page: Page
) -> None:
    console, run = shown
    page.goto(f"{console.url}/run/{run.run_id}/journal")
    rows = page.get_by_role("region", name="Operations").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("failed")
    expect(rows.first).to_contain_text("input_ids")
    expect(page.get_by_text("0 since the server started")).to_be_visible()
    page.goto(f"{console.url}/timeline")
    expect(page.locator(".gw-lanes canvas").first).to_be_visible()
    events = page.request.get(f"{console.url}/api/trace").json()["traceEvents"]
    own = [each for each in events if each.get("args", {}).get("run") == run.run_id and each["ph"] == "X"]
    assert {each["name"] for each in own} == {"forward_backward", "optim_step"}
    page.goto(f"{console.url}/server")
    expect(page.get_by_role("heading", name="Engine 0")).to_be_visible()
    expect(page.get_by_role("region", name="Usage by run")).to_contain_text(f"inside {EVIL}")
    expect(page.get_by_text("Nothing waits")).to_be_visible()
    expect(page.get_by_role("region", name="Usage by key")).to_contain_text("everyone")
    page.goto(f"{console.url}/audit")
    expect(page.get_by_role("row", name=f"run created inside {EVIL}")).to_be_visible()
    page.goto(f"{console.url}/ratings")
    expect(page.get_by_text("No feedback service is beside this console.")).to_be_visible()


def test_a_report_opens_offline(shown: tuple[Console, sync.TrainingClient], page: Page) -> None:
    console, run = shown
    report = page.request.get(f"{console.url}/api/report?runs={run.run_id}")
    assert "attachment" in report.headers["content-disposition"]
    page.context.set_offline(True)
    page.set_content(report.text())
    expect(page.get_by_role("heading", level=1)).to_have_text(f"inside {EVIL}")
    expect(page.locator("svg polyline").first).to_be_attached()
    expect(page.locator("img, script, link")).to_have_count(0)


def test_an_idle_run_says_where_it_was_left(shown: tuple[Console, sync.TrainingClient], page: Page) -> None:
    console, run = shown
    page.goto(f"{console.url}/run/{run.run_id}")
    now = page.locator(".gw-facts").first
    expect(now).to_contain_text("whether its program has ended or crashed is not known")
    expect(now).to_contain_text("since optim_step 2")
    expect(now).to_contain_text("1 step is in no checkpoint")
    expect(now).not_to_contain_text("has no optim_step yet")
    run.forward_backward(GROUP, "grpo").result(60)
    expect(now).to_contain_text("the newest gradient has no optim_step yet")
    run.optim_step().result(60)
    run.save_checkpoint("end").result(60)
    expect(now).to_contain_text("since save_checkpoint")
    expect(now).not_to_contain_text("in no checkpoint")
    expect(now).not_to_contain_text("has no optim_step yet")


@pytest.mark.parametrize("width", [pytest.param(400, marks=pytest.mark.slow), 1280])
def test_long_and_turning_names_keep_to_themselves(
    server: Server, shown: tuple[Console, sync.TrainingClient], browser: Browser, width: int
) -> None:
    console, _ = shown
    with gradwire.sync.connect(server.address) as service, page_of(browser, width) as page:
        names = ("\u202eturned", "\u0645\u0631\u062d\u0628\u0627 1", "long" * 50, "plain")
        runs = [service.create_run("tiny", lora={"rank": 2}, name=each, tags={"seen": each}) for each in names]
        for run in runs:
            run.forward_backward(GROUP, "grpo").result(60)
        asked = ",".join(run.run_id for run in runs)
        page.goto(f"{console.url}/?{width}")
        if width > 400:  # a phone leaves the tags out
            for run in runs[:2]:
                cell = page.locator(f'tr[data-key="{run.run_id}"] td').nth(1)
                expect(cell.locator(".sub")).to_be_attached()
                name, tag = (cell.locator(each).bounding_box() for each in ("a", ".sub"))
                assert name and tag and name["x"] + name["width"] <= tag["x"], "the tag stands behind the name"
        fits = "document.documentElement.scrollWidth <= innerWidth"
        assert page.evaluate(fits), "the runs"
        page.goto(f"{console.url}/compare?runs={asked}")
        expect(page.locator(".gw-plot canvas").first).to_be_visible()
        assert page.evaluate(fits), "the comparison"
        long = runs[2]
        called = {"name": "look", "arguments": {"for": names[2]}, "content": names[2], "error": ""}
        answer = {"observation": names[2], "action": names[2], "tool_results": [called]}
        about = {"reason": names[2], "metrics": {names[2]: 1.0}, "steps": [answer]}
        long.record_rollouts(1, [{"group": 0, "member": n, "reward": n} | about for n in range(2)])
        long.save_checkpoint(names[2][:50], note=names[2]).result(60)
        here = f"run/{long.run_id}"
        for path in (here, f"{here}/checkpoints", f"{here}/rollouts", f"{here}/journal", "audit", "server"):
            page.goto(f"{console.url}/{path}")
            expect(page.locator(".gw-server .gw-state.connected")).to_be_attached()
            expect(page.locator(".gw-skeleton")).to_have_count(0)
            assert page.evaluate(fits), path
        page.goto(f"{console.url}/playground?models={long.run_id}/{names[2][:50]}&prompt=a&tokens=2")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator(".gw-answer")).to_be_visible()
        assert page.evaluate(fits), "the playground"
        page.set_content(page.request.get(f"{console.url}/api/report?runs={asked}").text())
        boxes = [each.bounding_box() for each in page.locator("h1 bdi").all()]
        assert page.evaluate(fits) and len(boxes) == 4, "the report"
        assert boxes[0] and boxes[1] and (boxes[0]["x"], boxes[0]["y"]) < (boxes[1]["x"], boxes[0]["y"] + 1)
        for run in runs:
            service.delete_run(run.run_id)
