"""A training job goes on after kill -9 of the training server and of the service, and makes one version."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gradwire.rlhf import TrainingResult
from gradwire_feedback.settings import Settings
from gradwire_feedback.training.preferences import PreferenceResult
from gradwire_feedback.training.server import TrainingServer
from support.child import children
from support.feedback import QUICK, FeedbackService, scores
from support.server import Server, free_port

pytestmark = pytest.mark.long

STEPS = 25
DPO_STEPS = 150
PATIENCE_S = 300


@pytest.mark.slow
def test_a_job_survives_the_death_of_the_service_and_its_server(tiny_model_path: Path, tmp_path: Path) -> None:
    """The embedded server ends with the service that started it."""
    with FeedbackService(tmp_path, f"tiny={tiny_model_path}") as service:
        job = at_work(service, 16)
        killed = training_server_of(service.process.pid)
        service.end(signal.SIGKILL)
        service.start()
        assert training_server_of(service.process.pid) != killed
        completed(service, job, tmp_path, 16)


@pytest.mark.slow
def test_a_job_survives_the_deaths_of_server_and_service(tiny_model_path: Path, tmp_path: Path) -> None:
    with FeedbackService(tmp_path, f"tiny={tiny_model_path}") as service:
        job = at_work(service, STEPS)
        killed = training_server_of(service.process.pid)
        os.kill(killed, signal.SIGKILL)
        after = wait_for_step(service, job, step_of(service, job) + 3)
        assert training_server_of(service.process.pid) != killed
        assert after < STEPS, "the service dies in the middle of the job as well"
        service.end(signal.SIGKILL)
        service.start()
        completed(service, job, tmp_path, STEPS)


def at_work(service: FeedbackService, steps: int) -> str:
    """A job of a service, which has taken the first three of so many steps."""
    with service.client() as api:
        assert api.post("/feedback/bot", json=scores(12)).status_code == 201
        begun = api.post("/train_policy/bot", json=QUICK | {"maxSteps": steps}, headers={"Prefer": "respond-async"})
        job = str(begun.json()["id"])
    assert 3 <= wait_for_step(service, job, 3) < steps, "the job was over before anything was killed"
    return job


def completed(service: FeedbackService, job: str, folder: Path, steps: int) -> None:
    """Wait for the job's one version, whose record has every step once."""
    wait_for_step(service, job, steps)
    with service.client() as api:
        while (ended := api.get(f"/jobs/{job}").json())["status"] == "running":
            time.sleep(0.2)
        assert ended["status"] == "succeeded", ended
        assert [each["version"] for each in api.get("/bot").json()] == ["v12"]
        answer = api.post("/bot/generate", json={"prompt": "Say 1", "maxNewTokens": 4})
        assert answer.status_code == 200, answer.text
    result = TrainingResult.load(folder / "models" / "bot" / "v12")
    assert result.training_steps == len(result.reward_history) == steps
    rows = sqlite3.connect(folder / "feedback.db").execute("SELECT count(*) FROM policies").fetchone()
    assert rows == (1,)


@pytest.mark.slow
def test_a_training_on_preferences_ends_the_same_after_kills(tiny_model_path: Path, tmp_path: Path) -> None:
    """The engine that trains dies, and then the service with its server; the other training is left alone."""
    orders = [{"prompt": f"Say {n % 4}", "responses": [f"Better {n}", f"Worse {n}"]} for n in range(12)]
    preferences = {"method": "dpo", "maxSteps": DPO_STEPS, "batchSize": 2, "learningRate": 1e-3, "maxNewTokens": 4}
    with FeedbackService(tmp_path, f"tiny={tiny_model_path}") as service:
        with service.client() as api:
            for agent in ("calm", "killed"):
                assert api.post(f"/rankings/{agent}", json=orders).status_code == 201
            begun = api.post("/train_policy/killed", json=preferences, headers={"Prefer": "respond-async"})
            job = str(begun.json()["id"])
        assert 3 <= wait_for_step(service, job, 3) < DPO_STEPS
        server = training_server_of(service.process.pid)
        os.kill(children(server)[0], signal.SIGKILL)
        assert wait_for_step(service, job, step_of(service, job) + 3) < DPO_STEPS
        assert training_server_of(service.process.pid) == server, "only its engine died"
        service.end(signal.SIGKILL)
        service.start()
        wait_for_step(service, job, DPO_STEPS)
        with service.client() as api:
            while (ended := api.get(f"/jobs/{job}").json())["status"] == "running":
                time.sleep(0.2)
            assert ended["status"] == "succeeded", ended
            assert [each["version"] for each in api.get("/killed").json()] == ["v12"]
            assert api.post("/train_policy/calm", json=preferences).status_code == 200
    killed, calm = (tmp_path / "models" / agent / "v12" for agent in ("killed", "calm"))
    found, expected = PreferenceResult.load(killed), PreferenceResult.load(calm)
    assert len(found.curves["loss"]) == DPO_STEPS and found.curves["loss"][-1] < found.curves["loss"][0]
    assert replace(found, checkpoint="") == replace(expected, checkpoint="")
    weights = [file.name for file in (calm / "policy").glob("*.safetensors")]
    assert weights and all(
        (killed / "policy" / name).read_bytes() == (calm / "policy" / name).read_bytes() for name in weights
    )


@pytest.mark.slow
def test_a_job_survives_the_death_of_a_server_that_runs_elsewhere(tiny_model_path: Path, tmp_path: Path) -> None:
    """The server of ``--service``, which whoever runs it starts again at the same address."""
    with (
        Server(tiny_model_path, tmp_path / "server", "--address", f"127.0.0.1:{free_port()}") as server,
        FeedbackService(tmp_path, "tiny", "--service", server.address) as service,
    ):
        with service.client() as api:
            assert api.post("/feedback/bot", json=scores(12)).status_code == 201
            begun = api.post("/train_policy/bot", json=QUICK | {"maxSteps": STEPS}, headers={"Prefer": "respond-async"})
            job = begun.json()["id"]
            wait_for_step(service, job, 3)
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            assert 3 <= step_of(service, job) < STEPS, "the server died in the middle of the job"
            server.start()
            wait_for_step(service, job, STEPS)
            while (ended := api.get(f"/jobs/{job}").json())["status"] == "running":
                time.sleep(0.2)
            assert ended["status"] == "succeeded", ended
            assert [each["version"] for each in api.get("/bot").json()] == ["v12"]
            api.put("/bot/deployment", json={"v12": 1.0})
            answer = api.post("/bot/generate", json={"prompt": "Say 1", "maxNewTokens": 4})
            assert answer.status_code == 200 and answer.json()["version"] == "v12", answer.text
        result = TrainingResult.load(tmp_path / "models" / "bot" / "v12")
        assert result.training_steps == len(result.reward_history) == STEPS


@pytest.mark.slow
async def test_a_server_or_an_engine_that_is_away_is_told(tiny_model_path: Path, tmp_path: Path) -> None:
    running = await asyncio.to_thread(Server(tiny_model_path, tmp_path / "server").start)
    settings = Settings("127.0.0.1", 0, "", tmp_path, "tiny", "tiny", service=running.address)
    server = TrainingServer(settings)
    await server.start()
    try:
        assert await server.trouble() == ""
        running.process.send_signal(signal.SIGSTOP)
        assert "does not answer" in await server.trouble()
        running.process.send_signal(signal.SIGCONT)
        assert await server.trouble() == ""
        os.kill(running.engine_pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while "engine of the training server" not in await server.trouble():
            assert time.monotonic() < deadline
        while await server.trouble():
            assert time.monotonic() < deadline
    finally:
        await server.stop()
        assert await asyncio.to_thread(running.end) == 0


@pytest.mark.slow
def test_a_service_that_stops_in_a_job_goes_on_with_it(tiny_model_path: Path, tmp_path: Path) -> None:
    with FeedbackService(tmp_path, f"tiny={tiny_model_path}") as service:
        with service.client() as api:
            api.post("/feedback/bot", json=scores(12))
            begun = api.post("/train_policy/bot", json=QUICK | {"maxSteps": 12}, headers={"Prefer": "respond-async"})
            job = begun.json()["id"]
        wait_for_step(service, job, 2)
        assert service.end() == 0
        service.start()
        wait_for_step(service, job, 12)
        with service.client() as api:
            while (ended := api.get(f"/jobs/{job}").json())["status"] == "running":
                time.sleep(0.2)
            assert ended["status"] == "succeeded", ended
            assert len(api.get("/bot").json()) == 1


def step_of(service: FeedbackService, job: str) -> int:
    """Steps of the policy that are done."""
    with service.client() as api:
        found = api.get(f"/jobs/{job}").json()
    assert found["status"] in ("queued", "running", "succeeded"), found
    progress = found["progress"]
    if found["status"] == "succeeded" or (progress and progress["stage"] == "export"):
        return 10**6
    return int(progress["step"]) if progress and progress["stage"] in ("policy", "preferences") else 0


def wait_for_step(service: FeedbackService, job: str, step: int) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while (done := step_of(service, job)) < step:
        assert time.monotonic() < deadline, f"step {done} of {step} after {PATIENCE_S} s"
        time.sleep(0.1)
    return done


def training_server_of(pid: int) -> int:
    """The embedded server that this service has now."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in children(pid):
            try:
                command = Path(f"/proc/{child}/cmdline").read_text()
            except OSError:
                continue  # it ended meanwhile
            if "gradwire_server.cli\0serve" in command:
                return child
        time.sleep(0.1)
    raise AssertionError("the service has no training server")
