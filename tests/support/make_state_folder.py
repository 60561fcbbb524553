"""Makes an archive of a state folder as the present version writes it:

``PYTHONPATH=tests:examples python tests/support/make_state_folder.py OUT.tar.xz``

The server is killed in the middle of its work, so the folder holds what a crash leaves: a write-ahead log, results that
nobody fetched, operations without a result, checkpoints with operations behind them, a job that has taken some of its
steps, and beside it an uploaded file, a session with an answer, and a part of a batch. Beside the folder lies
``expected.json``: what a server of any later version has to make of it.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import gradwire
import httpx

from support.jobs import write_data
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

ROW = [5, 9, 23, 7, 40, 11]
SETTINGS = {"seed": 7, "lora": {"rank": 2, "dropout": 0.1}}
QUEUED = 40
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
JOB = {"model": "tiny", "max_steps": 8, "save_every": 2, "lora_rank": 2, "max_tokens": 64, "held_out": 0}
ANSWER = {"model": "x", "messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
"""What is asked of the session."""


def train(run: gradwire.sync.TrainingClient, count: int) -> list[float]:
    """Take steps and return their losses."""
    losses = []
    for _ in range(count):
        losses.append(run.forward_backward({"input_ids": [ROW]}, "causal_lm").result().loss)
        run.optim_step(learning_rate=1e-2).result()
    return losses


def file_contents(url: str) -> dict[str, str]:
    """Name of each uploaded file -> SHA-256 of what is downloaded."""
    with httpx.Client(base_url=url, timeout=60) as http:
        listed = http.get("/v1/files").raise_for_status().json()["data"]
        contents = {each["filename"]: http.get(f"/v1/files/{each['id']}/content") for each in listed}
    return {name: hashlib.sha256(each.raise_for_status().content).hexdigest() for name, each in contents.items()}


def model_of(folder: Path) -> Path:
    """The tests' model, which can converse."""
    model = tiny_model(folder / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = HttpServer(model_of(folder), folder / "state", free_port(), "--threads", "1", real=True)
        server.start()
        data = write_data(folder)
        with gradwire.sync.connect(server.address) as service:
            run = service.create_run("tiny", name="first", tags={"kept": "yes"}, **SETTINGS)
            losses = train(run, 3)
            run.save_checkpoint("three").result()
            losses += train(run, 2)
            other = service.create_run("tiny", lora=2, seed=3)
            [scored] = train(other, 1)
            job = service.jobs.submit("sft", JOB | {"data": str(data["talks"])})
            session = service.rollout_session("tiny", task=1)
            headers = {"x-api-key": session.key}
            said = httpx.post(f"{session.openai_url}/chat/completions", json=ANSWER, headers=headers, timeout=60)
            parts = service.create_run("tiny", lora=2, seed=4)
            labelled: dict[str, Any] = {"input_ids": [ROW], "label": [1.0]}
            parts.forward_backward(labelled, "bco", {"reference_model": "base"}, accumulate=True).result()
            queued = service.create_run("tiny", lora=2, seed=5)
            while (done := service.jobs.get(job.job_id)).step < 3:
                assert not done.has_ended, done.error
                time.sleep(0.02)
            for _ in range(QUEUED):
                queued.forward_backward({"input_ids": [ROW] * 16}, "causal_lm")
                queued.optim_step(learning_rate=1e-3)
            while queued.info().accepted_seq < 2 * QUEUED:
                time.sleep(0.005)
            files = file_contents(server.url)
            server.end(signal.SIGKILL)
            expected = {
                "run_id": run.run_id, "losses": losses, "step": 5, "accepted_seq": 11,
                "other_run_id": other.run_id, "other_loss": scored, "parts_run_id": parts.run_id,
                "queued_run_id": queued.run_id, "queued": QUEUED, "files": files, "job_id": job.job_id,
                "job_steps": JOB["max_steps"], "session_id": session.session_id,
                "said": said.raise_for_status().json()["choices"][0]["message"]["content"],
            }  # fmt: skip
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        with tarfile.open(out, "w:xz") as archive:
            for part in ("state", "expected.json"):
                archive.add(folder / part, arcname=part)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
