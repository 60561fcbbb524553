"""Jobs and files on the server: who may do what, states, limits, turns, and what is kept over a restart.

No worker runs here (``job_workers=0``) except where a test plays one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradwire.recipes import command
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_server.access.key_file import KeyFile, Quota
from gradwire_server.access.keys import Caller
from gradwire_server.cli.state import backup_app
from gradwire_server.core.jobs import files, workers
from gradwire_server.core.jobs.specs import RECIPES
from gradwire_server.journal.backup import backup, restore
from gradwire_server.journal.repair import repair
from support.front import Start, start
from support.job_stubs import NO_WORKERS, ROW, create, refused, stub_of, upload
from support.keyed import code_of
from typer.testing import CliRunner

__all__ = ["start"]


async def test_a_job_belongs_to_its_key(start: Start, tmp_path: Path) -> None:
    secrets = {name: KeyFile(tmp_path).create(name, "admin" if name == "root" else "user") for name in "ab"}
    secrets["root"] = KeyFile(tmp_path).create("root", "admin")
    async with start(**NO_WORKERS) as door:
        ada, bob, root = [await stub_of(door, secrets[name]) for name in ("a", "b", "root")]
        nobody = await stub_of(door, "wrong")
        job, file = await create(ada), await upload(ada)
        about_job = [
            (name, getattr(jobs, f"{name}Request")(job_id=job.job_id))
            for name in ("GetJob", "CancelJob", "PauseJob", "ResumeJob", "DeleteJob", "ListJobEvents", "ReadJobLog",
                         "ReportJob")
        ]  # fmt: skip
        for name, request in about_job:
            assert code_of(await refused(getattr(bob, name)(request))) == "unknown_job", name
            assert code_of(await refused(getattr(nobody, name)(request))) == "unauthenticated", name
        for name in ("GetFile", "DeleteFile"):
            request = getattr(jobs, f"{name}Request")(file_id=file.file_id)
            assert code_of(await refused(getattr(bob, name)(request))) == "unknown_file", name
        assert code_of(await refused(bob.ReadFile(jobs.ReadFileRequest(file_id=file.file_id)).read())) == "unknown_file"
        assert code_of(await refused(create(bob, data=file.file_id))) == "unknown_file"
        assert not (await bob.ListJobs(jobs.ListJobsRequest())).jobs
        assert not (await bob.ListFiles(jobs.ListFilesRequest())).files
        assert [each.job_id for each in (await root.ListJobs(jobs.ListJobsRequest())).jobs] == [job.job_id]
        assert (await root.CancelJob(jobs.CancelJobRequest(job_id=job.job_id))).state == "cancelled"
        # A secret that the server lends to a worker has the owner's rights, until it is taken back or the key revoked.
        with door.server.core.keys.lent("a") as secret:
            lent = await stub_of(door, secret)
            assert (await lent.GetJob(jobs.GetJobRequest(job_id=job.job_id))).owner == "a"
            KeyFile(tmp_path).revoke("a")
            assert code_of(await refused(lent.GetJob(jobs.GetJobRequest(job_id=job.job_id)))) == "unauthenticated"
        KeyFile(tmp_path).create("a")
        assert code_of(await refused(lent.GetJob(jobs.GetJobRequest(job_id=job.job_id)))) == "unauthenticated"


@pytest.mark.long
async def test_reports_are_fenced_and_repeated_steps_replaced(start: Start) -> None:
    async with start(**NO_WORKERS) as door:
        stub, core = await stub_of(door), door.server.core
        job = await create(stub)

        def step(number: int, attempt: int, loss: float, **more: Any) -> jobs.ReportJobRequest:
            data = json.dumps({"train/loss": loss, "train/tokens": 10})
            event = jobs.JobEvent(step=number, type="metrics", level="info", message=f"step {number}", data=data)
            return jobs.ReportJobRequest(job_id=job.job_id, attempt=attempt, events=[event], **more)

        assert code_of(await refused(stub.ReportJob(step(1, 0, 1.0)))) == "stale_epoch"
        await core.job_turns.begin(job.job_id)
        await stub.ReportJob(step(1, 1, 3.0))
        point = jobs.JobCheckpoint(step=2, path="run-x/step-2")
        for _ in range(2):
            reported = await stub.ReportJob(step(2, 1, 2.0, checkpoints=[point, point], run_id="run-x", total_steps=5))
        assert (reported.step, reported.trained_tokens, len(reported.checkpoints)) == (2, 20, 1)
        await core.job_turns.worker_ended(job.job_id, 1, -9)
        assert (await core.job_turns.begin(job.job_id)).attempt == 2
        assert code_of(await refused(stub.ReportJob(step(2, 1, 9.0)))) == "stale_epoch"
        await stub.ReportJob(step(2, 2, 2.5))
        end = jobs.ReportJobRequest(job_id=job.job_id, attempt=2, state="succeeded", result_files=["file-r"])
        assert (await stub.ReportJob(end)).state == "succeeded"
        assert code_of(await refused(stub.ReportJob(end))) == "stale_epoch"
        answer = await stub.ListJobEvents(jobs.ListJobEventsRequest(job_id=job.job_id, oldest_first=True))
        losses = [json.loads(event.data)["train/loss"] for event in answer.events if event.type == "metrics"]
        assert losses == [3.0, 2.5]
        assert [event.number for event in answer.events] == list(range(1, len(answer.events) + 1))
        newest = await stub.ListJobEvents(jobs.ListJobEventsRequest(job_id=job.job_id, page_size=2))
        assert newest.has_more and newest.events[0].message == "The job has successfully completed"
        rest = jobs.ListJobEventsRequest(job_id=job.job_id, after=newest.events[-1].number)
        assert len((await stub.ListJobEvents(rest)).events) == len(answer.events) - 2


async def test_what_is_acknowledged_survives_a_restart(start: Start, tmp_path: Path) -> None:
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        job = await create(stub, "key")
        running = await create(stub, "other")
        await door.server.core.job_turns.begin(running.job_id)
        paused = await stub.PauseJob(jobs.PauseJobRequest(job_id=job.job_id))
        (tmp_path / "files" / "left-over").write_bytes(b"of an upload that a kill cut off")
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        assert await stub.GetJob(jobs.GetJobRequest(job_id=job.job_id)) == paused
        assert (await stub.GetJob(jobs.GetJobRequest(job_id=running.job_id))).state == "queued"
        settings = json.loads(job.spec.settings)
        assert (await create(stub, "key", **settings)).job_id == job.job_id
        assert code_of(await refused(create(stub, "key", **settings | {"seed": 5}))) == "already_exists"
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [hashlib.sha256(ROW * 3).hexdigest()]


async def test_a_backup_and_a_repair_have_jobs_and_files(start: Start, tmp_path: Path) -> None:
    copy, again = tmp_path.with_name("copy"), tmp_path.with_name("again")
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        job = await create(stub)
        folder = tmp_path / "jobs" / job.job_id
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        await asyncio.to_thread(backup, tmp_path, copy, print)
    await asyncio.to_thread(restore, copy, again, print)
    assert (again / "jobs" / job.job_id / "state.json").read_text() == "{}"
    assert [path.read_bytes() for path in (again / "files").iterdir()] == [ROW * 3]
    await asyncio.to_thread(repair, tmp_path, "", print)
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        assert (await stub.GetJob(jobs.GetJobRequest(job_id=job.job_id))).spec == job.spec
        assert (await stub.ListFiles(jobs.ListFilesRequest())).files[0].size_bytes == 3 * len(ROW)
        assert (await stub.ListJobEvents(jobs.ListJobEventsRequest(job_id=job.job_id))).events
    [content] = (copy / "files").iterdir()
    content.unlink()  # linked: the folder it was copied from keeps it
    content.write_bytes(b"x")
    with pytest.raises(Exception, match="is damaged"):
        await asyncio.to_thread(restore, copy, tmp_path.with_name("third"), print)


@pytest.mark.long
async def test_what_is_stored_is_what_was_stored(start: Start, tmp_path: Path) -> None:
    """A flipped bit, a cut, another content and none: a refusal that names the file, wherever it is read."""
    content = ROW * 3
    async with start(http="127.0.0.1:0", **NO_WORKERS) as door:
        stub = await stub_of(door)
        file = await upload(stub)
        stored = tmp_path / "files" / file.digest.hex()
        read = jobs.ReadFileRequest(file_id=file.file_id)
        async with httpx.AsyncClient(base_url=door.server.http.url, timeout=60) as http:
            wrong = [bytes([content[0] ^ 1]) + content[1:], content[:-1], ROW * 2, None]
            for number, damaged in enumerate(wrong):
                stored.unlink()  # backups have links of it
                if damaged is not None:
                    stored.write_bytes(damaged)
                error = await refused(stub.ReadFile(read).read())
                assert code_of(error) == "checkpoint_corrupt" and file.file_id in error.message, number
                answer = await http.get(f"/v1/files/{file.file_id}/content")
                assert answer.status_code == 422 and "data.jsonl" in answer.json()["error"]["message"]
                assert (await http.get(f"/v1/files/{file.file_id}")).json()["status"] == "error"
                command = await app_of_backup(tmp_path, tmp_path.with_name(f"copy-{number}"))
                assert command.exit_code == 1 and file.file_id in command.output, command.output
                with pytest.raises(Exception, match="is damaged"):
                    await asyncio.to_thread(restore, tmp_path.with_name(f"copy-{number}"), tmp_path / "x", print)
                again = await upload(stub)  # the same content heals the first
                frames = [frame.chunk async for frame in stub.ReadFile(read)]
                assert b"".join(frames) == content and again.digest == file.digest
                assert (await http.get(f"/v1/files/{file.file_id}")).json()["status"] == "processed"
        command = await app_of_backup(tmp_path, tmp_path.with_name("whole"))
        assert command.exit_code == 0, command.output


async def app_of_backup(state: Path, to: Path) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, backup_app, [str(to), "--state-dir", str(state)])


@pytest.mark.long
async def test_files_are_stored_once_checked_and_deleted(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        first, second = await upload(stub), await upload(stub)
        assert first.file_id != second.file_id and first.num_lines == 3 and not first.problems
        assert len(list((tmp_path / "files").iterdir())) == 1
        kept = (await upload(stub, key="k")).file_id
        assert (await upload(stub, key="k")).file_id == kept
        for other in ({"content": ROW * 4}, {"filename": "other.jsonl"}, {"purpose": "script"}):
            error = await refused(upload(stub, key="k", **other))
            assert code_of(error) == "already_exists" and kept in error.message and error.field == "idempotency_key"
        job = await create(stub, key="j")
        assert (await create(stub, key="j")).job_id == job.job_id  # of another file with the same content
        assert code_of(await refused(create(stub, key="j", seed=2))) == "already_exists"
        other_data = (await upload(stub, ROW * 4)).file_id
        assert code_of(await refused(create(stub, key="j", data=other_data))) == "already_exists"
        await stub.CancelJob(jobs.CancelJobRequest(job_id=job.job_id))
        chunks = [frame.chunk async for frame in stub.ReadFile(jobs.ReadFileRequest(file_id=first.file_id))]
        assert b"".join(chunks) == ROW * 3
        wrong = await upload(stub, ROW + b'{"speech": 1}\nnot json\n' + b"[]\n" * 30)
        assert (wrong.num_lines, wrong.num_problems, len(wrong.problems)) == (33, 32, 20)
        assert [problem.line for problem in wrong.problems[:2]] == [2, 3]
        assert "not valid JSON" in wrong.problems[1].reason and "speech" in wrong.problems[0].reason
        job = await create(stub, data=first.file_id)
        assert job.job_id in (await refused(stub.DeleteFile(jobs.DeleteFileRequest(file_id=first.file_id)))).message
        await stub.CancelJob(jobs.CancelJobRequest(job_id=job.job_id))
        for file in (await stub.ListFiles(jobs.ListFilesRequest())).files:
            await stub.DeleteFile(jobs.DeleteFileRequest(file_id=file.file_id))
        assert list((tmp_path / "files").iterdir()) == []
        soon = await upload(stub, expires_at=time.time() + 3600)
        assert (await stub.GetFile(jobs.GetFileRequest(file_id=soon.file_id))).expires_at == soon.expires_at
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3601)
        assert await stub.ListFiles(jobs.ListFilesRequest()) == jobs.ListFilesResponse()
        assert code_of(await refused(stub.GetFile(jobs.GetFileRequest(file_id=soon.file_id)))) == "unknown_file"
        await upload(stub, ROW)
        assert len(list((tmp_path / "files").iterdir())) == 1
        for file, field in [({"purpose": "assistants"}, "purpose"), ({"filename": ""}, "file")]:
            assert (await refused(upload(stub, **file))).field == field
        assert "empty" in (await refused(upload(stub, b""))).message


async def test_limits_and_quotas(start: Start, tmp_path: Path) -> None:
    limits = {"max_file_bytes": 200, "key_jobs": 1, "max_jobs": 2, "max_files": 3}
    quota = Quota(file_bytes=250)
    secrets = {name: KeyFile(tmp_path).create(name, "user", quota if name == "a" else None) for name in "abc"}
    async with start(limits=limits, **NO_WORKERS) as door:
        ada, bob, carl = [await stub_of(door, secrets[name]) for name in "abc"]
        assert (await refused(upload(ada, ROW * 10))).rule == "max_file_bytes = 200"
        file = await upload(ada)
        assert (await refused(upload(ada, ROW * 4))).rule == "file_bytes = 250"
        await create(ada, data=file.file_id)
        assert (await refused(create(ada, data=file.file_id))).rule == "key_jobs = 1"
        await create(bob)
        third = await upload(carl)
        assert (await refused(create(carl, data=third.file_id))).rule == "max_jobs = 2"
        assert (await refused(upload(carl))).rule == "max_files = 3"
    with_key_files = {"key_file_bytes": 100}
    async with start(limits=with_key_files, **NO_WORKERS) as door:
        assert (await refused(upload(await stub_of(door, secrets["b"])))).rule == "file_bytes = 100"


@pytest.mark.long
async def test_keys_take_turns_within_their_quotas(start: Start, tmp_path: Path) -> None:
    quotas = {"a": None, "b": Quota(running_jobs=1)}
    secrets = {name: KeyFile(tmp_path).create(name, "user", quota) for name, quota in quotas.items()}
    async with start(limits={"key_running_jobs": 3}, **NO_WORKERS) as door:
        stubs = {name: await stub_of(door, secret) for name, secret in secrets.items()}
        made = [await create(stubs[name]) for name in "aaaaabb"]
        known, begun = door.server.core.job_turns, list[jobs.Job]()
        while (job := known.choose([each.job_id for each in begun])) is not None:
            begun.append(await known.begin(job.job_id))
        assert [job.owner for job in begun] == ["a", "b", "a", "a"]  # b has one at a time, a three
        assert [job.job_id for job in begun if job.owner == "a"] == [job.job_id for job in made[:3]]


@pytest.mark.long
async def test_wrong_requests_are_told(start: Start) -> None:
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        file = await upload(stub)
        for settings, field in [
            ({"model": "other"}, "model"),
            ({"data": "/etc/passwd"}, "data"),
            ({"data": file.file_id, "validation": "/etc/passwd"}, "validation"),
            ({"data": file.file_id, "address": "elsewhere:1"}, "address"),
            ({"data": file.file_id, "loggers": ["wandb"]}, "loggers"),
            ({"foo": 1}, "settings"),
            ({"max_steps": -1}, "settings"),
            ({"learning_rate": float("nan")}, "settings"),
            ({"loss": {"reduction": float("inf")}}, "settings"),
        ]:
            error = await refused(create(stub, **settings))
            assert error.field == field and error.message, error
        assert (await refused(create(stub, recipe="rm -rf"))).field == "recipe"
        assert "--job-scripts" in (await refused(create(stub, recipe="script", script=file.file_id))).message
        for text in ("[]", "{", "[" * 100_000):
            spec = jobs.JobSpec(recipe="sft", settings=text)
            assert (await refused(stub.CreateJob(jobs.CreateJobRequest(spec=spec)))).field == "settings"
        page = jobs.ListJobsRequest(after="ftjob-none")
        assert (await refused(stub.ListJobs(page))).field == "after"
        job = await create(stub)
        assert code_of(await refused(stub.DeleteJob(jobs.DeleteJobRequest(job_id=job.job_id)))) == "unsupported"


async def test_scripts_are_for_administrators(start: Start, tmp_path: Path) -> None:
    secrets = {name: KeyFile(tmp_path).create(name, role) for name, role in (("u", "user"), ("r", "admin"))}  # type: ignore[arg-type]
    async with start(job_scripts=True, **NO_WORKERS) as door:
        user, root = await stub_of(door, secrets["u"]), await stub_of(door, secrets["r"])
        for stub, allowed in ((user, False), (root, True)):
            script = await upload(stub, b"print(1)", filename="train.py", purpose="script")
            spec = jobs.JobSpec(recipe="script", settings=json.dumps({"script": script.file_id}))
            call = stub.CreateJob(jobs.CreateJobRequest(spec=spec))
            if allowed:
                assert (await call).state == "queued"
            else:
                assert code_of(await refused(call)) == "permission_denied"


async def test_a_worker_that_cannot_be_started_is_tried_again_and_then_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[float]()

    async def pass_by(_stop: asyncio.Event, seconds: float) -> None:
        waited.append(seconds)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workers, "_wait", pass_by)
    monkeypatch.setattr(workers, "_open_log", full)
    async with start(job_workers=1) as door:
        stub = await stub_of(door)
        job = await create(stub)
        async with asyncio.timeout(60):
            while (job := await stub.GetJob(jobs.GetJobRequest(job_id=job.job_id))).state != "failed":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (job.error.code, job.attempt) == ("worker_crashed", 5)
        assert waited[:4] == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.long
async def test_jobs_run_no_code_that_their_settings_name(start: Start) -> None:
    async with start(**NO_WORKERS) as door:
        stub = await stub_of(door)
        for field, given in (("reward", "my.py:score"), ("reward", {"os:system": 1.0}), ("environment", "a.b:C")):
            error = await refused(create(stub, recipe="grpo", **{field: given}))
            assert error.field == field and f"{field} names code of its own" in error.message
        for field, given in (("environment", "agent"), ("command", "sh")):
            error = await refused(create(stub, recipe="grpo", **{field: given}))
            assert error.field == field and "gradwire train" in error.message
        error = await refused(create(stub, recipe="grpo", reward="../judge"))
        assert error.field == "reward" and "name a reward, or a reward model RUN_ID/NAME" in error.message
        await create(stub, recipe="grpo", reward={"last_number": 1.0})


def test_a_job_runs_every_recipe_of_the_command_line() -> None:
    assert set(RECIPES) == set(command.RECIPES), "the server may not import the client, and so has a list of its own"


async def test_few_files_are_checked_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check is a process that may take 4 GiB: one of each key, two in all."""
    now: list[str] = []
    most: list[list[str]] = []

    async def check(_path: Path, file: jobs.File) -> None:
        now.append(file.owner)
        most.append(sorted(now))
        for _ in range(20):
            await asyncio.sleep(0)
        now.remove(file.owner)

    async def content() -> AsyncIterator[bytes]:
        yield ROW

    monkeypatch.setattr(files, "_check_lines", check)
    async with start() as door:
        described = jobs.File(filename="a.jsonl", purpose="fine-tune")
        keys = ["ada", "bob", "eve"] * 3
        await asyncio.gather(*(door.server.core.files.create(Caller(key), described, content()) for key in keys))
    assert len(most) == len(keys) and max(map(len, most)) == 2
    assert all(len(set(each)) == len(each) for each in most)
