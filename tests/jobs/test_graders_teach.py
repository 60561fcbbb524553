"""A reinforcement job with each grader, whose reward rises."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.chats import chat_model
from support.server import free_port
from support.tinker import HttpServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ANSWER = "{{ sample.output_text }}"
ASKED = [{"role": "user", "content": ANSWER}]
PYTHON = {
    "type": "python", "name": "count",
    "source": "def grade(sample, item): return sample['output_text'].count(item['letter']) / 8",
}  # fmt: skip
SIMILAR = {
    "type": "text_similarity", "name": "near", "input": ANSWER, "reference": "{{ item.phrase }}",
    "evaluation_metric": "fuzzy_match",
}  # fmt: skip
CHECK = {"type": "string_check", "name": "has", "input": ANSWER, "reference": "{{ item.letter }}", "operation": "like"}
JUDGE = "{{ judge }}"
SCORE = {"type": "score_model", "name": "score", "model": JUDGE, "input": ASKED, "range": [0, 1]}
LABEL = {
    "type": "label_model", "name": "kind", "model": JUDGE, "input": ASKED, "labels": ["good", "bad"],
    "passing_labels": ["good"],
}  # fmt: skip
SAID: dict[str, tuple[Any, Any]] = {"score_model": (0.9, 0.1), "label_model": ("good", "bad")}
"""What the judges say of answers with an e, and of others."""
GRADERS: dict[str, dict[str, Any]] = {
    "string_check": CHECK,
    "text_similarity": SIMILAR,
    "python": PYTHON,
    "score_model": SCORE,
    "label_model": {"type": "multi", "graders": {"kind": LABEL}, "calculate_output": "kind"},
    "multi": {"type": "multi", "graders": {"has": CHECK, "count": PYTHON}, "calculate_output": "(has + count) / 2"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("graders")
    model = chat_model(folder / "marked", "marked")
    running = HttpServer(model, folder / "state", free_port(), "--threads", "1", name="marked")
    running.start()
    yield running
    assert running.end() == 0


@pytest.fixture(scope="module")
def api(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=120) as api:
        yield api


def trained(api: httpx.Client, rows: list[dict[str, Any]], method: str, settings: Any, **gradwire: int) -> Any:
    """A job on all weights of the model that has succeeded."""
    form = {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())}
    file = api.post("/files", files=form, data={"purpose": "fine-tune"}).json()
    body = {
        "model": "marked", "training_file": file["id"], "seed": 1, "method": {"type": method, method: settings},
        "gradwire": {"lora_rank": 0, **gradwire},
    }  # fmt: skip
    job = api.post("/fine_tuning/jobs", json=body).json()
    assert "id" in job, job
    while job["status"] not in ("succeeded", "failed"):
        time.sleep(0.2)
        job = api.get(f"/fine_tuning/jobs/{job['id']}").json()
    assert job["status"] == "succeeded", job["error"]
    return job


def judge(api: httpx.Client, good: Any, bad: Any) -> str:
    """The name of a model that tells answers with an e from others: an untrained one says the same of nearly all."""
    texts = []
    for n in range(32):
        asked = {"model": "marked", "messages": [{"role": "user", "content": f"{n} and"}], "n": 8, "max_tokens": 8}
        choices = api.post("/chat/completions", json={**asked, "seed": n}).json()["choices"]
        texts += [choice["message"]["content"] for choice in choices]
    having, lacking = ([text for text in texts if ("e" in text) == has] for has in (True, False))
    rows = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": json.dumps({"result": said})},
            ]
        }
        for pair in zip(having, lacking, strict=False)  # as many of both
        for text, said in zip(pair, (good, bad), strict=True)
    ]
    numbers = {"n_epochs": 32, "batch_size": 8, "learning_rate_multiplier": 50}
    return str(trained(api, rows, "supervised", {"hyperparameters": numbers})["fine_tuned_model"])


@pytest.mark.parametrize("kind", GRADERS)
def test_a_grader_teaches(api: httpx.Client, kind: str) -> None:
    grader = json.dumps(GRADERS[kind])
    if kind in SAID:
        grader = grader.replace(JUDGE, judge(api, *SAID[kind]))
    rows = [{"messages": [{"role": "user", "content": f"{n} and"}], "letter": "e", "phrase": "eeee"} for n in range(16)]
    numbers = {"n_epochs": 8, "batch_size": 8, "learning_rate_multiplier": 500}
    settings = {"grader": json.loads(grader), "hyperparameters": numbers}
    job = trained(api, rows, "reinforcement", settings, answer_tokens=8)
    events = api.get(f"/fine_tuning/jobs/{job['id']}/events", params={"limit": 100}).json()["data"]
    data = [event["data"] for event in reversed(events) if event["type"] == "metrics"]
    rewards = [each["train_reward_mean"] for each in data]
    print(f"{kind}: mean reward {' '.join(f'{each:.2f}' for each in rewards)}")
    assert all(each["rewards/not_scored"] == 0 for each in data)
    assert sum(rewards[-4:]) > 1.2 * sum(rewards[:4]), rewards
