"""Fifty kills at random moments of jobs of each method: the same final metrics, one set of checkpoints each."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import gradwire
import pytest
from support.chats import chat_model
from support.jobs import SETTINGS, curves, finished, kill, workers, write_data
from support.server import Server, free_port

KILLS = int(os.environ.get("GRADWIRE_KILLS", "17"))
"""Of each method."""
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"data": "talks"},
    "dpo": {"data": "pairs"},
    "grpo": {
        "data": "sums", "max_steps": 5, "save_every": 2, "batch_size": 2, "group_size": 2, "answer_tokens": 4,
        "eval_problems": 2,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", METHODS)
async def test_kills_at_random_moments_change_nothing(recipe: str, tmp_path: Path, seed: int) -> None:
    data, model = write_data(tmp_path), await asyncio.to_thread(chat_model, tmp_path / "marked", "marked")
    settings = SETTINGS | METHODS[recipe] | {"data": str(data[METHODS[recipe]["data"]])}
    flags = ("--address", f"127.0.0.1:{free_port()}", "--threads", "1")
    server = await asyncio.to_thread(Server(model, tmp_path / "state", *flags, name="marked").start)
    chance, kills, ended = random.Random(seed), 0, 0
    try:
        async with gradwire.connect(server.address) as service:
            job = await service.jobs.submit(recipe, settings)
            undisturbed = await finished(service, job.job_id)
            while kills < KILLS:
                job = await service.jobs.submit(recipe, settings)
                while kills < KILLS and not (await service.jobs.get(job.job_id)).has_ended:
                    await asyncio.sleep(chance.uniform(0.0, 6.0))
                    victim = chance.choice(("worker", "worker", "engine", "front"))
                    if victim == "front":
                        await asyncio.to_thread(server.end, signal.SIGKILL)
                        await asyncio.to_thread(server.start)
                    elif victim == "engine":
                        kill(server.engine_pid)
                    for pid in workers(server.process.pid) if victim == "worker" else ():
                        kill(pid)
                    kills += 1
                assert await finished(service, job.job_id) == undisturbed
                known = await service.jobs.get(job.job_id)
                assert len({each.path for each in known.checkpoints}) == len(known.checkpoints)
                assert [run.run_id for run in await service.list_runs() if run.name == job.job_id] == [known.run_id]
                ended += 1
    finally:
        server.end()
    print(f"{recipe}: {kills} kills in {ended} jobs, each with the metrics of an undisturbed one")


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
