"""Many jobs of several keys at once, and what the job system takes while there is none."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gradwire
import pytest
from gradwire_server.access.key_file import KeyFile, Quota
from support.chats import chat_model
from support.jobs import SETTINGS, workers, write_data
from support.server import Server

pytestmark = pytest.mark.long

KEYS = {"anna": 1, "bert": 2, "carl": 2, "dora": 2}
"""Keys with the jobs that each may run at once."""
EACH, WORKERS = 5, 4
IDLE_BYTES = 5 << 20
IMPORTS = """
import gc, importlib, json, sys
from pathlib import Path
def resident():
    gc.collect()
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) << 10
def grown(*names):
    before = resident()
    assert "gradwire_server." + names[0] not in sys.modules, names[0]
    for name in names:
        importlib.import_module("gradwire_server." + name)
    return resident() - before
import fastapi, grpc
from gradwire_server import durable_files, config
from gradwire_server.core import uploads
from gradwire_server.journal import journal
jobs = grown("journal.job_records")
from gradwire_server.core import runs, texts
jobs += grown("core.jobs.jobs", "core.jobs.turns", "core.jobs.workers", "core.jobs.webhook",
             "core.jobs.file_parts", "core.jobs.grading")
grown("core.core", "doors.http.openai.chat", "doors.http.openai.completions")
doors = grown("doors.grpc.jobs", "doors.http.openai.uploads", "doors.http.openai.fine_tuning.routes")
print(json.dumps([jobs, doors]))
"""


@pytest.mark.slow
def test_an_idle_job_system_is_small() -> None:
    """By the pages that its modules add to a process that has imported all that they share with others."""
    grown = json.loads(subprocess.check_output([sys.executable, "-c", IMPORTS], text=True))
    print(f"the job system: {grown[0] / 2**20:.1f} MB, its routes: {grown[1] / 2**20:.1f} MB")
    assert sum(grown) < IDLE_BYTES


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_twenty_jobs_of_four_keys_are_fair_and_within_their_quotas(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    secrets = {name: KeyFile(state).create(name, quota=Quota(running_jobs=running)) for name, running in KEYS.items()}
    data, model = write_data(tmp_path), await asyncio.to_thread(chat_model, tmp_path / "marked", "marked")
    server = Server(model, state, "--threads", "1", "--job-workers", str(WORKERS), name="marked", real=True)
    await asyncio.to_thread(server.start)
    settings = SETTINGS | {"max_steps": 10}
    try:
        assert workers(server.process.pid) == []

        async def file_of(name: str) -> str:
            async with gradwire.connect(server.address, api_key=secrets[name]) as service:
                return (await service.files.upload(data["talks"])).file_id

        async def jobs_of(name: str, file_id: str) -> list[gradwire.Job]:
            async with gradwire.connect(server.address, api_key=secrets[name]) as service:
                return [await service.jobs.submit("sft", settings | {"data": file_id}) for _ in range(EACH)]

        files = {name: await file_of(name) for name in KEYS}  # first: all jobs wait before the first has ended
        made = {job.job_id: name for name in KEYS for job in await jobs_of(name, files[name])}
        running_most: Counter[str] = Counter()
        began: list[str] = []
        key = await asyncio.to_thread(KeyFile(state).create, "root", "admin")
        async with gradwire.connect(server.address, api_key=key) as service:
            known: dict[str, gradwire.Job] = {}
            while not known or not all(known[each].has_ended for each in made):
                known = {job.job_id: job for job in await service.jobs.list()}
                now = Counter(made[each] for each in made if known[each].state == "running")
                assert sum(now.values()) <= WORKERS
                running_most |= now
                await asyncio.sleep(0.05)
            events = {each: await service.jobs.events(each) for each in made}
        starts = {
            each: next(event.created_at for event in told if event.message == "The job has started.")
            for each, told in events.items()
        }
        began = [made[each] for each in sorted(made, key=starts.__getitem__)]
        assert {job.state for job in known.values()} == {"succeeded"}
        assert all(running_most[name] <= most for name, most in KEYS.items()), running_most
        first = Counter(began[:8])
        assert set(first) == set(KEYS) and max(first.values()) <= 3, began
        while workers(server.process.pid):  # noqa: ASYNC110  the last one tells the end, and then ends
            await asyncio.sleep(0.05)
    finally:
        server.end()
    print(f"20 jobs began in the order {' '.join(began)}; at most {dict(running_most)} ran at once")
