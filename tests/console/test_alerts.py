"""Alerts of a console, as a webhook gets them."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradwire
import pytest
from gradwire_console.cli import app
from support.console import Console
from support.server import Server
from support.web import Quiet, serving
from typer.testing import CliRunner

GROUP: dict[str, Any] = {
    "prompt_ids": [[5, 6, 7]],
    "response_ids": [[[10, 11], [12, 13]]],
    "rewards": [[1.0, 1.0]],
    "sampler_log_probs": [[[-1.0, -2.0], [-3.0, -4.0]]],
}


@contextmanager
def webhook(failures: int) -> Iterator[tuple[str, queue.Queue[dict[str, str]]]]:
    """A server that refuses its first requests, and keeps what the others say."""
    taken: queue.Queue[dict[str, str]] = queue.Queue()
    left = [failures]

    class Taker(Quiet):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            left[0] -= 1
            self.send_response(503 if left[0] >= 0 else 204)
            self.end_headers()
            if left[0] < 0:
                taken.put(body)

    with serving(Taker) as address:
        yield f"http://{address}/hook", taken


@pytest.mark.long
def test_a_webhook_is_told_once_of_what_is_new(server: Server) -> None:
    with (
        webhook(failures=1) as (url, taken),
        gradwire.sync.connect(server.address) as service,
        Console(server.address, "--webhook", url) as console,
    ):
        run = service.create_run("tiny", lora={"rank": 2}, name="without signal")
        for _ in range(5):
            run.forward_backward(GROUP, "grpo").result(60)
            run.optim_step().result(60)
        told = [taken.get(timeout=60)]
        others = service.create_run("tiny", lora={"rank": 2}, name="another")
        while told[-1]["run"] != "another":
            run.forward_backward(GROUP, "grpo").result(60)
            others.forward_backward(GROUP, "grpo").result(60)
            told.append(taken.get(timeout=60))
    about = [(each["run"], each["alert"]) for each in told]
    assert len(set(about)) == len(about), "none is told again"
    assert ("without signal", "zero_gradient") in about
    silent = told[about.index(("without signal", "zero_spread_groups"))]
    assert silent["run_id"] == run.run_id and silent["url"] == f"{console.url}/run/{run.run_id}"
    assert silent["what"] == "100% of the groups give no signal: all their rewards are equal."
    assert silent["text"] == f"without signal: {silent['what']} {silent['remedy']} {silent['url']}"


def test_the_address_of_a_webhook_is_checked() -> None:
    result = CliRunner().invoke(app, ["--webhook", "chat.example/hook"])
    assert result.exit_code == 2 and "'chat.example/hook' is not an address" in result.stderr
