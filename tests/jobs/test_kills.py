"""Fifty kills at random moments of fine-tuning jobs of each method: equal final metrics, one model each."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import gradwire
import openai
import pytest
from support.chats import chat_model
from support.jobs import SETTINGS, curves, finished, workers, write_data
from support.server import Server, free_port
from support.stage import kill
from support.tinker import HttpServer

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("GRADWIRE_KILLS", "17"))
"""Of each method."""
GRADER = {
    "type": "string_check", "name": "right", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    "operation": "like",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "supervised": {"data": "talks"},
    "dpo": {"data": "pairs"},
    "reinforcement": {
        "data": "sums", "max_steps": 5, "save_every": 2, "group_size": 2, "answer_tokens": 4, "eval_problems": 2,
    },
}  # fmt: skip


def create(client: openai.OpenAI, method: str, file_id: str) -> str:
    """Create a job of a method with the settings of ``SETTINGS``; its id."""
    batch = 2 if method == "reinforcement" else 8
    described: Any = {"type": method, method: {"hyperparameters": {"n_epochs": 9, "batch_size": batch}}}
    if method == "reinforcement":
        described[method]["grader"] = GRADER
    settings = {name: value for name, value in SETTINGS.items() if name not in ("model", "batch_size")}
    settings |= {name: value for name, value in METHODS[method].items() if name != "data"}
    job = client.fine_tuning.jobs.create(
        model="marked", training_file=file_id, seed=1, method=described, extra_body={"gradwire": settings}
    )
    return job.id


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS)
async def test_kills_at_random_moments_change_nothing(method: str, tmp_path: Path, seed: int) -> None:
    data, model = write_data(tmp_path), await asyncio.to_thread(chat_model, tmp_path / "marked", "marked")
    flags = ("--address", f"127.0.0.1:{free_port()}", "--threads", "1")
    server = HttpServer(model, tmp_path / "state", free_port(), *flags, name="marked")
    await asyncio.to_thread(server.start)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chance, kills, ended = random.Random(seed), dict.fromkeys(("worker", "engine", "front"), 0), 0
    try:
        with data[METHODS[method]["data"]].open("rb") as file:
            uploaded = await asyncio.to_thread(client.files.create, file=file, purpose="fine-tune")
        async with gradwire.connect(server.address) as service:
            undisturbed = await finished(service, await asyncio.to_thread(create, client, method, uploaded.id))
            while sum(kills.values()) < KILLS:
                job_id = await asyncio.to_thread(create, client, method, uploaded.id)
                while sum(kills.values()) < KILLS and not (await service.jobs.get(job_id)).has_ended:
                    await asyncio.sleep(chance.uniform(0.0, 6.0))
                    victim = chance.choice(("worker", "worker", "engine", "front"))
                    if victim == "front":
                        await asyncio.to_thread(server.end, signal.SIGKILL)
                        await asyncio.to_thread(server.start)
                    elif victim == "engine":
                        kill(server.engine_pid)
                    elif found := workers(server.process.pid):
                        kill(found[0])
                    else:
                        continue
                    kills[victim] += 1
                assert await finished(service, job_id) == undisturbed
                known = await service.jobs.get(job_id)
                assert len({each.path for each in known.checkpoints}) == len(known.checkpoints)
                assert [run.run_id for run in await service.list_runs() if run.name == job_id] == [known.run_id]
                job = await asyncio.to_thread(client.fine_tuning.jobs.retrieve, job_id)
                names = [each.id for each in await asyncio.to_thread(client.models.list)]
                mine = [name for name in names if job_id.removeprefix("ftjob-") in name and ":ckpt-" not in name]
                assert mine == [job.fine_tuned_model]
                ended += 1
    finally:
        client.close()
        server.end()
    print(f"{method}: kills of {kills} in {ended} jobs, each with the metrics and the one model of an undisturbed one")


@pytest.mark.slow
async def test_a_worker_that_dies_without_a_step_over_and_over_fails_its_job(tmp_path: Path) -> None:
    data, model = write_data(tmp_path), await asyncio.to_thread(chat_model, tmp_path / "marked", "marked")
    server = await asyncio.to_thread(Server(model, tmp_path / "state", name="marked").start)
    try:
        async with gradwire.connect(server.address) as service:
            job = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"])})
            attempt = 0
            while not (known := await service.jobs.get(job.job_id)).has_ended:
                if known.attempt > attempt and (found := workers(server.process.pid)):
                    attempt = known.attempt
                    for pid in found:
                        kill(pid)
            assert (known.state, known.error_code, known.attempt) == ("failed", "worker_crashed", 5)
            assert curves(await service.jobs.events(job.job_id)) == {}
    finally:
        server.end()
