"""Clients of OpenAI's fine-tuning API as they are, in environments of their own: ``make fine-tuning-clients``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chats import chat_model
from support.server import free_port
from support.tinker import HttpServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS = Path(os.environ.get("FINE_TUNING_CLIENTS", ROOT / ".venv-tuners"))
WANDB = Path(os.environ.get("FINE_TUNING_WANDB", ROOT / ".venv-wandb")) / "lib" / "python3.11" / "site-packages"
NEEDS = "needs the environment of `make fine-tuning-clients`"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose jobs find wandb, where it is installed."""
    folder = tmp_path_factory.mktemp("clients")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(WANDB)]).strip(os.pathsep))
        running = HttpServer(
            chat_model(folder / "marked", "marked"), folder / "state", free_port(), "--threads", "1", name="marked"
        )
        running.start()
    yield running
    assert running.end() == 0


def run(command: list[Any], **options: Any) -> dict[str, Any]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.skipif(not (CLIENTS / "bin" / "python").exists(), reason=NEEDS)
@pytest.mark.parametrize("package", ["openai", "litellm", "dspy"])
def test_python_clients_train(server: HttpServer, package: str) -> None:
    told = run([CLIENTS / "bin" / "python", HERE / "clients.py", package, f"{server.url}/v1", "marked"])
    assert told["status"] == "succeeded" and isinstance(told["answer"], str), told
    if package == "openai":
        assert told["answer"] == "four"
        assert told["events"][0] == "The job has successfully completed" and told["steps"] == [32, 16]
    if package == "litellm":
        assert "is succeeded and cannot be cancelled" in told["refused"]
    if package == "dspy":
        assert told["model"].startswith("ft:marked:") and told["model"] in told["models"]


@pytest.mark.skipif(
    not ((CLIENTS / "node_modules" / "openai").exists() and shutil.which("node")), reason=f"{NEEDS}, and node"
)
def test_the_npm_package_trains(server: HttpServer) -> None:
    command = ["node", "--input-type=module", "-", f"{server.url}/v1", "marked"]
    told = run(command, input=(HERE / "client.mjs").read_text(), cwd=CLIENTS)
    assert (told["status"], told["answer"], told["steps"]) == ("succeeded", "four", [32, 16]), told
    assert told["events"][0] == "The job has successfully completed" and told["refused"].startswith("400 ")


@pytest.mark.skipif(not (WANDB / "wandb").exists(), reason=NEEDS)
def test_wandb_gets_every_step(server: HttpServer) -> None:
    api = httpx.Client(base_url=f"{server.url}/v1", timeout=60)
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "four"}]}
            for n in range(12)]  # fmt: skip
    form = {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())}
    file = api.post("/files", files=form, data={"purpose": "fine-tune"}).json()
    integration = {"type": "wandb", "wandb": {"project": "answers-of-four", "name": "first", "tags": ["red-team"]}}
    body = {
        "model": "marked", "training_file": file["id"], "integrations": [integration],
        "hyperparameters": {"n_epochs": 1, "batch_size": 2},
    }  # fmt: skip
    job = api.post("/fine_tuning/jobs", json=body).json()
    assert job["integrations"] == [integration], job
    while job["status"] not in ("succeeded", "failed"):
        job = api.get(f"/fine_tuning/jobs/{job['id']}").json()
    assert job["status"] == "succeeded", job
    (written,) = (server.state_dir / "jobs" / job["id"] / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    assert job["id"] in written.name
    for told in (b"answers-of-four", b"first", b"red-team", b"eval/", b"train/token_accuracy"):
        assert (told in content) == (told != b"eval/"), told
    assert content.count(b"train/token_accuracy") >= 6  # a step each
