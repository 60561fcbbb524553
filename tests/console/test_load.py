"""What the server is asked by a console with no page open, with one, and with ten: counted, so a busy machine changes
nothing."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import gradwire
import httpx
import pytest
from gradwire import sync
from playwright.sync_api import Browser, Page, expect
from prometheus_client.parser import text_string_to_metric_families
from support.chromium import PATIENCE_MS
from support.console import Console
from support.server import Server, free_port

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROWS = {"input_ids": [[5, 6, 7, 8, 9, 10]] * 2}
WINDOW_S = 12.0
TRAINING = {"Submit", "Results", "AckResults", "OpenRun"}
PER_S = {"GetServerInfo": 0.5, "ListQueues": 0.5, "GetUsage": 0.1, "ListKeys": 1 / 30, "ListOperations": 1.0,
         "ListCheckpoints": 1.0, "GetHistory": 0.1}  # fmt: skip
"""Most calls a second, for all pages together, while a run trains; of anything else, none."""


def calls(metrics: str) -> Counter[str]:
    """The calls that the server has served, by method."""
    families = text_string_to_metric_families(httpx.get(f"http://{metrics}/metrics", timeout=60).text)
    found = [each for family in families for each in family.samples if each.name == "gradwire_grpc_calls_total"]
    return Counter({each.labels["method"]: int(each.value) for each in found})


def while_training(run: sync.TrainingClient, metrics: str, pages: list[Page]) -> tuple[Counter[str], float]:
    """What is called while a run trains, beside the calls of the training, and in how many seconds."""
    begun, before = time.monotonic(), calls(metrics)
    while time.monotonic() - begun < WINDOW_S:
        run.forward_backward(ROWS, "causal_lm")
        run.optim_step(learning_rate=1e-3).result(60)
        for page in pages[:1]:
            page.wait_for_timeout(50)  # its events are taken
    found = calls(metrics) - before
    return Counter({name: count for name, count in found.items() if name not in TRAINING}), time.monotonic() - begun


def test_ten_pages_ask_no_more_than_one(tiny_model_path: Path, tmp_path: Path, browser: Browser) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    with (
        Server(tiny_model_path, tmp_path / "state", "--metrics-address", metrics, "--job-workers", "1") as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
    ):
        run = service.create_run("tiny", lora={"rank": 2}, name="watched")
        run.forward_backward(ROWS, "causal_lm").result(60)
        run.save_checkpoint("kept").result(60)
        assert while_training(run, metrics, [])[0] == Counter(), "nobody looks, and nothing is asked"
        here = f"run/{run.run_id}"
        paths = [here, "", "server", "timeline", f"{here}/journal", f"compare?runs={run.run_id}", "jobs", "server"]
        paths += [f"{here}/journal", f"{here}/checkpoints"]
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        pages = [context.new_page()]
        pages[0].goto(f"{console.url}/{here}")
        expect(pages[0].locator(".gw-server .gw-state.connected")).to_be_visible(timeout=PATIENCE_MS)
        pages[0].wait_for_timeout(3000)  # a long record comes whole after a second: on a fast machine this one is long
        found, _ = while_training(run, metrics, pages)
        assert found.keys() <= {"ListCheckpoints"}, "a run's page has all from the stream, but what a save adds"
        for path in paths[1:]:
            pages.append(context.new_page())
            pages[-1].goto(f"{console.url}/{path}")
            expect(pages[-1].locator(".gw-server .gw-state.connected")).to_be_visible(timeout=PATIENCE_MS)
        found, seconds = while_training(run, metrics, pages)
        assert found.keys() <= PER_S.keys() and {"ListOperations", "ListQueues", "GetServerInfo"} <= found.keys()
        for name, count in found.items():
            assert count <= seconds * PER_S[name] + 2, (name, count, seconds)
        pages[0].wait_for_timeout(3000)  # what changed last is asked
        before = calls(metrics)
        pages[0].wait_for_timeout(9000)
        assert (calls(metrics) - before).total() <= 4, "while nothing happens, the server's state, at most every ten s"
        context.close()
