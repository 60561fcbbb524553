"""Programs that record agents over the unmodified `tinker` SDK, as proxies of their own; by `make tinker`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cookbook import MARKS, PYTHON, environment, run_program, served
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

MODEL = "Qwen/Qwen3-8B"
START_S = 240
ASKED: Any = {"model": "any", "max_tokens": 6, "messages": [{"role": "user", "content": "the cat"}]}
GATEWAY = """
import asyncio, json, sys
import httpx, tinker, transformers
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.tinker_sdk import TinkerSdkBackend

model, asked = sys.argv[1], json.loads(sys.argv[2])
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}" \\
    "{% if add_generation_prompt %}assistant: {% endif %}"
client = tinker.ServiceClient().create_sampling_client(base_model=model)
backend, renderer = TinkerSdkBackend(client), HfTemplateRenderer(tokenizer)
gateway = RolloutGateway(backend=backend, renderer=renderer, tokenizer=tokenizer, history_mode="linear")
server = ThreadedGatewayServer(gateway, host="127.0.0.1")
server.start()
gateway.create_session("one")
with httpx.Client(base_url=server.base_url, headers={"Authorization": "Bearer one"}, timeout=120) as agent:
    for more in ("", "go on"):
        if more:
            asked["messages"].append({"role": "user", "content": more})
        answer = agent.post("/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        asked["messages"].append(answer.json()["choices"][0]["message"])
future = asyncio.run_coroutine_threadsafe(gateway.finish_session("one", reward=1.0), server._loop)
rows = [vars(each) for each in future.result(60)]
for row in rows:
    prompt = tinker.ModelInput.from_ints(row["token_ids"])
    row["scored"] = client.compute_logprobs(prompt).result()
print(json.dumps(rows, default=str))
server.shutdown()
"""

pytestmark = MARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    tiny_model(folder / MODEL, context_length=1024)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    yield from served(folder, MODEL)


def test_the_cookbooks_capture_records_an_agent(server: HttpServer, folder: Path) -> None:
    port = free_port()
    command = [str(PYTHON), "-m", "tinker_cookbook.capture.proxy.serve", "--base-model", MODEL, f"--port={port}"]
    command += ["--renderer-name=role_colon", f"--store-data-dir={folder / 'store'}", "--flush-interval-sec=0.1"]
    url, log = f"http://127.0.0.1:{port}", folder / "proxy.log"
    with log.open("wb") as out:
        proxy = subprocess.Popen(command, cwd=folder, env=environment(server, folder), stdout=out, stderr=out)
    try:
        until = time.monotonic() + START_S
        while "capture proxy for" not in log.read_text() or not answers(f"{url}/healthz"):
            assert proxy.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.3)
        answer = httpx.post(f"{url}/r/run/x/traj/3/v1/chat/completions", json=ASKED, timeout=120)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        (store,) = re.findall(r"store (http\S+)", log.read_text())
        while not (rows := httpx.get(f"{store}/runs/x/rows", timeout=60).json()["rows"]):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
    finally:
        proxy.send_signal(signal.SIGINT)
        proxy.wait(60)
    (row,) = rows
    assert row["traj_idx"] == 3 and len(row["prompt_tokens"]) == usage["prompt_tokens"]
    assert len(row["sampled_tokens"]) == len(row["logprobs"]) == usage["completion_tokens"] > 0
    assert max(row["logprobs"]) < 0


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_gateway_of_agentcore_records_an_agent(server: HttpServer, folder: Path) -> None:
    """One sequence of two turns, whose log-probabilities are those that the server computes for the whole of it."""
    (row,) = json.loads(run_program(server, folder, "-c", GATEWAY, MODEL, json.dumps(ASKED)).splitlines()[-1])
    begin = len(row["token_ids"]) - len(row["loss_mask"])
    sampled = [at for at, kept in enumerate(row["loss_mask"]) if kept]
    assert len(sampled) > 2 and sampled != list(range(len(sampled))), "two turns, and a question between them"
    for at in sampled:
        assert row["logprobs"][at] == pytest.approx(row["scored"][begin + at], abs=1e-3)
