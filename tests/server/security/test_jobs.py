"""What a key tries with its own jobs and files: none of it is the server's mistake, costs others, or misleads them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.core.jobs import file_parts, grading
from gradwire_server.core.jobs.specs import settings_of
from support.job_stubs import NO_WORKERS, create, refused, stub_of, upload
from support.keyed import code_of

FAR = 2**64 - 1
"""More than SQLite, or the position in a file, can be."""


async def test_only_its_worker_reports_on_a_job(keyed: Any) -> None:
    async with keyed(**NO_WORKERS) as door:
        core, ada = door.door.server.core, await stub_of(door.door, door.secrets["ada"])
        job = await create(ada)
        await core.job_turns.begin(job.job_id)
        lie = jobs.JobEvent(step=FAR, type="metrics", data="[1]", created_at=math.nan)
        report = jobs.ReportJobRequest(job_id=job.job_id, attempt=1, events=[lie], run_id="run-of-another")
        assert code_of(await refused(ada.ReportJob(report))) == "permission_denied"
        with core.keys.lent("ada") as secret:
            worker = await stub_of(door.door, secret)
            await worker.ReportJob(jobs.ReportJobRequest(job_id=job.job_id, attempt=1, total_steps=3))
            wrong = [
                lie, jobs.JobEvent(data="{"), jobs.JobEvent(step=1, data='{"train/tokens": "x"}'),
                jobs.JobEvent(step=1, data='{"train/tokens": 1e400}'), jobs.JobEvent(created_at=math.inf),
            ]  # fmt: skip
            for event in wrong:
                report = jobs.ReportJobRequest(job_id=job.job_id, attempt=1, events=[event])
                assert code_of(await refused(worker.ReportJob(report))) == "invalid_argument", event
            point = jobs.JobCheckpoint(step=1, path="run-x/a", metrics="{")
            report = jobs.ReportJobRequest(job_id=job.job_id, attempt=1, checkpoints=[point])
            assert code_of(await refused(worker.ReportJob(report))) == "invalid_argument"
        known = await ada.GetJob(jobs.GetJobRequest(job_id=job.job_id))
        assert (known.step, known.trained_tokens, known.run_id, known.total_steps) == (0, 0, "", 3)


async def test_what_a_door_keeps_with_a_job_is_no_callers_to_write(keyed: Any) -> None:
    """The HTTP door read it as its own: an administrator's list of all jobs failed by it."""
    async with keyed(http="127.0.0.1:0", **NO_WORKERS) as door:
        ada = await stub_of(door.door, door.secrets["ada"])
        file = await upload(ada)
        spec = jobs.JobSpec(recipe="sft", settings=json.dumps({"model": "tiny", "data": file.file_id}), note="{}")
        error = await refused(ada.CreateJob(jobs.CreateJobRequest(spec=spec)))
        assert (code_of(error), error.field) == ("invalid_argument", "note")
        await upload(ada, expires_at=time.time() + 3600)
        for expires_at in (math.inf, math.nan, 1e300):
            assert code_of(await refused(upload(ada, expires_at=expires_at))) == "invalid_argument"
        for filename in ("a\0.jsonl", "a\n.jsonl", "\x1b[2J.jsonl"):
            assert code_of(await refused(upload(ada, filename=filename))) == "invalid_argument"
        async with httpx.AsyncClient(base_url=door.door.server.http.url) as http:
            for name, path in (("ada", "files"), ("ada", "fine_tuning/jobs"), ("root", "fine_tuning/jobs")):
                headers = {"X-API-Key": door.secrets[name]}
                assert (await http.get(f"/v1/{path}", headers=headers)).status_code == 200


async def test_numbers_that_no_list_and_no_log_has_are_refused(keyed: Any) -> None:
    async with keyed(**NO_WORKERS) as door:
        ada = await stub_of(door.door, door.secrets["ada"])
        job = await create(ada)
        events = await ada.ListJobEvents(jobs.ListJobEventsRequest(job_id=job.job_id, after=FAR))
        assert [each.number for each in events.events] == [1]
        assert not (
            await ada.ListJobEvents(jobs.ListJobEventsRequest(job_id=job.job_id, after=FAR, oldest_first=True))
        ).events
        log = door.door.server.core.jobs.log_file(job.job_id)
        log.parent.mkdir(parents=True)
        log.write_text("said")
        read = await ada.ReadJobLog(jobs.ReadJobLogRequest(job_id=job.job_id, offset=FAR))
        assert (read.chunk, read.size_bytes) == (b"", 4)


@pytest.mark.long
async def test_many_long_jobs_do_not_make_files_dear(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of every job were read again for each file that expired: minutes of the event loop."""
    read: list[int] = []

    def counted(spec: jobs.JobSpec) -> Any:
        read.append(1)
        return settings_of(spec)

    monkeypatch.setattr("gradwire_server.core.jobs.specs.settings_of", counted)
    async with keyed(**NO_WORKERS) as door:
        ada, files = await stub_of(door.door, door.secrets["ada"]), door.door.server.core.files
        data = (await upload(ada)).file_id
        for _ in range(20):
            await create(ada, data=data, loss={"a": "x" * 100_000})
        for number in range(20):
            await upload(ada, b"%d" % number, purpose="script", expires_at=time.time() + 3600)
        for file in files._known.values():
            file.expires_at = min(file.expires_at, 1.0)
        before = len(read)
        await upload(ada, purpose="script")
        assert len(read) == before and len(files._known) == 2


async def test_uploads_that_were_cancelled_are_forgotten(keyed: Any) -> None:
    """Each stayed in memory for an hour, and every new one looked through them all."""
    async with keyed(**NO_WORKERS) as door:
        core, ada = door.door.server.core, door.door.server.core.keys.caller(door.secrets["ada"])
        described = jobs.File(filename="a.jsonl", purpose="fine-tune")
        made = []
        for _ in range(200):
            upload_ = await core.file_parts.create(ada, described, 5)
            made.append((await core.file_parts.cancel(ada, upload_.upload_id)).upload_id)
        assert len(core.file_parts._known) <= file_parts.MAX_ENDED_OF_KEY
        assert core.file_parts.get(ada, made[-1]).status == "cancelled"


@pytest.mark.long
async def test_graders_that_take_long_leave_room_for_other_keys(
    keyed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One key held all places, for a minute each, as long as it went on asking."""
    slow = {"type": "python", "name": "slow", "source": "def grade(sample, item):\n    while True: pass\n"}
    check = {"type": "string_check", "name": "a", "input": "a", "reference": "a", "operation": "eq"}
    monkeypatch.setattr(grading, "PATIENCE_S", 20.0)
    async with keyed(http="127.0.0.1:0", **NO_WORKERS) as door:
        url = door.door.server.http.url
        async with (
            httpx.AsyncClient(base_url=url, headers={"X-API-Key": door.secrets["bob"]}, timeout=120) as bob,
            httpx.AsyncClient(base_url=url, headers={"X-API-Key": door.secrets["ada"]}, timeout=120) as ada,
        ):
            route, asked = "/v1/fine_tuning/alpha/graders/run", {"model_sample": "a", "item": {}}
            flood = [asyncio.create_task(bob.post(route, json={"grader": slow} | asked)) for _ in range(12)]
            await asyncio.sleep(0.5)
            answer = await ada.post(route, json={"grader": check} | asked)
            assert answer.json()["reward"] == 1.0 and not any(task.done() for task in flood)
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)


async def test_a_template_that_repeats_a_text_is_bounded(keyed: Any) -> None:
    """A body of 4 MB asked for a text of a terabyte."""
    grader = {
        "type": "string_check",
        "name": "a",
        "input": "{{ item.a }}" * 100_000,
        "reference": "a",
        "operation": "eq",
    }
    async with keyed(http="127.0.0.1:0", **NO_WORKERS) as door, httpx.AsyncClient(timeout=120) as http:
        http.headers["X-API-Key"] = door.secrets["bob"]
        body = {"grader": grader, "model_sample": "a", "item": {"a": "x" * 1_000_000}}
        answer = await http.post(f"{door.door.server.http.url}/v1/fine_tuning/alpha/graders/run", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["reward"] == 0 and "characters" in found["gradwire"]["error"], found


async def test_recordings_without_content_do_not_become_many(keyed: Any) -> None:
    """Each wrote a file of 50 bytes, and looked through all of its run's: a million in what a run may have."""
    async with keyed(limits={"max_recorded_bytes": 1 << 18}) as door:
        run = await (await door.client("ada")).begin()
        for number in range(40):
            await run.stub.RecordRollouts(
                pb.RecordRolloutsRequest(run_id=run.run_id, iteration=number, rollouts_json=b"[]")
            )
        found = await run.stub.ListRecordings(pb.ListRecordingsRequest(run_id=run.run_id))
        assert [each.number for each in found.recordings] == list(range(24, 40))
