"""A reinforcement job with each grader, whose reward rises."""

from __future__ import annotations

import json
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
SCORE = {"type": "score_model", "name": "score", "model": "judge", "input": ASKED, "range": [0, 1]}
LABEL = {
    "type": "label_model", "name": "kind", "model": "judge", "input": ASKED, "labels": ["good", "bad", "even", "odd"],
    "passing_labels": ["bad", "even"],
}  # fmt: skip
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
    running = HttpServer(
        model, folder / "state", free_port(), "--threads", "1", "--model", f"judge={model}", name="marked"
    )
    running.start()
    yield running
    assert running.end() == 0


@pytest.mark.parametrize("kind", GRADERS)
def test_a_grader_teaches(server: HttpServer, kind: str) -> None:
    api = httpx.Client(base_url=f"{server.url}/v1", timeout=120)
    rows = [{"messages": [{"role": "user", "content": f"{n} and"}], "letter": "e", "phrase": "eeee"} for n in range(16)]
    form = {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())}
    file = api.post("/files", files=form, data={"purpose": "fine-tune"}).json()
    numbers = {"n_epochs": 8, "batch_size": 8, "learning_rate_multiplier": 1000}
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADERS[kind], "hyperparameters": numbers}}
    body = {
        "model": "marked", "training_file": file["id"], "seed": 1, "method": method,
        "gradwire": {"answer_tokens": 8, "lora_rank": 0},
    }  # fmt: skip
    job = api.post("/fine_tuning/jobs", json=body).json()
    assert "id" in job, job
    while job["status"] not in ("succeeded", "failed"):
        job = api.get(f"/fine_tuning/jobs/{job['id']}").json()
    assert job["status"] == "succeeded", job["error"]
    events = api.get(f"/fine_tuning/jobs/{job['id']}/events", params={"limit": 100}).json()["data"]
    data = [event["data"] for event in reversed(events) if event["type"] == "metrics"]
    rewards = [each["train_reward_mean"] for each in data]
    print(f"{kind}: mean reward {' '.join(f'{each:.2f}' for each in rewards)}")
    assert all(each["rewards/not_scored"] == 0 for each in data)
    assert sum(rewards[-4:]) > 1.2 * sum(rewards[:4]), rewards
