"""Jobs on a real server with a tiny model: what they give, also when their processes are killed or stopped."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.cli.app import app
from gradwire_http.child_processes import start_process
from support.chats import chat_model
from support.jobs import SETTINGS, STEPS, finished, reached, workers, write_data
from support.server import Server, free_port
from support.stage import kill
from typer.testing import CliRunner

pytestmark = pytest.mark.long

SCRIPT = """
import gradwire, os
with gradwire.sync.connect(os.environ["GRADWIRE_ADDRESS"]) as service:
    print("models:", service.list_models()[0].name)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("jobs")
    model = chat_model(folder / "marked", "marked")
    flags = ("--address", f"127.0.0.1:{free_port()}", "--threads", "1", "--grace", "5", "--job-scripts")
    running = Server(model, folder / "state", *flags, name="marked").start()
    yield running
    running.end()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
async def service(server: Server) -> AsyncIterator[gradwire.ServiceClient]:
    async with gradwire.connect(server.address) as service:
        yield service


@pytest.fixture(scope="module")
async def undisturbed(server: Server, data: dict[str, Path]) -> dict[int, Any]:
    """What a job gives when nothing disturbs it."""
    async with gradwire.connect(server.address) as service:
        job = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"])})
        return dict(await finished(service, job.job_id))


async def test_a_job_tells_everything_and_leaves_results(
    server: Server, service: gradwire.ServiceClient, data: dict[str, Path], undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    job = next(each for each in await service.jobs.list() if each.recipe == "sft")
    assert (job.state, job.step, job.total_steps, job.attempt) == ("succeeded", STEPS, STEPS, 1)
    assert job.trained_tokens == sum(metrics["train/tokens"] for metrics in undisturbed.values())
    assert [each.step for each in job.checkpoints] == [20, 40, STEPS]
    assert sorted(undisturbed) == list(range(1, STEPS + 1)) and "eval/loss" in undisturbed[25]
    assert undisturbed[STEPS]["train/loss"] < undisturbed[1]["train/loss"]
    events = await service.jobs.events(job.job_id)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].message == "The job has successfully completed"
    (warned,) = [event.message for event in events if event.level == "warn"]
    assert warned == "talks.jsonl: rows have id, which is not used (64, first at talks.jsonl, line 1)"
    assert "SFT" in await service.jobs.log(job.job_id)
    table = await service.files.download(job.result_files[0], tmp_path / "results.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert float(rows[-1]["train_loss"]) == undisturbed[STEPS]["train/loss"]
    ids = [[5, 6, 7]]
    sampled = await service.sampling_client(job.checkpoints[-1].path).sample(ids, max_tokens=2)
    assert len(sampled.samples[0][0].token_ids) <= 2
    while workers(server.process.pid):  # noqa: ASYNC110  it tells the end, and then ends
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_kills_change_nothing(server: Server, data: dict[str, Path], undisturbed: dict[int, Any]) -> None:
    async with gradwire.connect(server.address) as service:
        job = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"])})
        await reached(service, job.job_id, 2)
        for pid in workers(server.process.pid):
            kill(pid)
        await reached(service, job.job_id, 25)
        kill(server.engine_pid)
        await reached(service, job.job_id, 45)
        server.end(signal.SIGKILL)
        server.start()
        assert await finished(service, job.job_id) == undisturbed
        ended = await service.jobs.get(job.job_id)
        assert ended.attempt in (2, 3)  # it may have ended just before the server was killed
        assert len({each.path for each in ended.checkpoints}) == len(ended.checkpoints) == 3
        assert [run.run_id for run in await service.list_runs() if run.name == job.job_id] == [ended.run_id]
        assert len(ended.result_files) == 1


async def test_a_stopped_server_goes_on_with_its_jobs(
    server: Server, data: dict[str, Path], undisturbed: dict[int, Any]
) -> None:
    async with gradwire.connect(server.address) as service:
        job = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"])})
        await reached(service, job.job_id, 2)
        command = [sys.executable, "-c", "from gradwire.cli.app import app; app()", "jobs", "logs", "--follow"]
        following = await start_process(
            *command, job.job_id, "--address", server.address, stdout=asyncio.subprocess.PIPE
        )
        assert following.stdout is not None and b"Created" in await following.stdout.readline()
        assert await asyncio.to_thread(server.end) == 0
        await asyncio.to_thread(server.start)
        assert b"has successfully completed" in await following.stdout.read()
        assert await finished(service, job.job_id) == undisturbed


async def test_pause_and_resume(
    server: Server, service: gradwire.ServiceClient, data: dict[str, Path], undisturbed: dict[int, Any]
) -> None:
    job = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"])})
    await reached(service, job.job_id, 2)
    both = await asyncio.gather(*(service.jobs.pause(job.job_id) for _ in range(2)))
    assert [*(each.state for each in both), (await service.jobs.pause(job.job_id)).state] == ["paused"] * 3
    assert [each.message for each in await service.jobs.events(job.job_id)].count("The job was paused.") == 1
    assert (await service.jobs.resume(job.job_id)).state == "queued"
    assert await finished(service, job.job_id) == undisturbed
    with pytest.raises(gradwire.UnsupportedError, match="is succeeded and cannot be paused"):
        await service.jobs.pause(job.job_id)


async def test_cancel_ends_the_worker_and_keeps_what_there_is(
    server: Server, service: gradwire.ServiceClient, data: dict[str, Path]
) -> None:
    job = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"]), "max_steps": 500})
    await reached(service, job.job_id, 21)
    cancelled = await service.jobs.cancel(job.job_id)
    assert cancelled.state == "cancelled" and cancelled.checkpoints
    with pytest.raises(gradwire.UnsupportedError, match="is cancelled and cannot be cancelled"):
        await service.jobs.cancel(job.job_id)
    with pytest.raises(gradwire.UnsupportedError, match="cannot be resumed"):
        await service.jobs.resume(job.job_id)
    other = await service.jobs.submit("sft", SETTINGS | {"data": str(data["talks"]), "max_steps": 1})
    await finished(service, other.job_id)  # the only worker's place is free again
    assert (await service.jobs.get(job.job_id)).step == cancelled.step
    await service.jobs.delete(job.job_id)
    with pytest.raises(gradwire.UnknownJobError):
        await service.jobs.get(job.job_id)


async def test_a_repeated_submission_is_one_job(
    service: gradwire.ServiceClient, data: dict[str, Path], tmp_path: Path
) -> None:
    file = await service.files.upload(data["talks"])
    settings = SETTINGS | {"data": file.file_id, "max_steps": 1}
    first = await service.jobs.submit("sft", settings, idempotency_key="once")
    assert (await service.jobs.submit("sft", settings, idempotency_key="once")).job_id == first.job_id
    with pytest.raises(gradwire.AlreadyExistsError, match=first.job_id):
        await service.jobs.submit("sft", settings | {"max_steps": 2}, idempotency_key="once")
    with_path = settings | {"data": str(data["talks"])}
    assert (await service.jobs.submit("sft", with_path, idempotency_key="once")).job_id == first.job_id
    assert (await service.jobs.submit("sft", with_path, idempotency_key="once")).job_id == first.job_id
    changed = tmp_path / data["talks"].name
    changed.write_bytes(data["talks"].read_bytes() * 2)
    with pytest.raises(gradwire.AlreadyExistsError, match="with other content"):
        await service.jobs.submit("sft", with_path | {"data": str(changed)}, idempotency_key="once")
    await finished(service, first.job_id)


async def test_mistakes_are_told(service: gradwire.ServiceClient, data: dict[str, Path], tmp_path: Path) -> None:
    good = SETTINGS | {"data": str(data["talks"])}
    before = await service.files.list()
    for wrong, sentence in [
        ({"learning_rat": 1.0}, "did you mean learning_rate"),
        ({"model": "other"}, "'other'"),
        ({"data": "absent.jsonl"}, "there is no file 'absent.jsonl'"),
        ({"data": "file-absent"}, "there is no file 'file-absent'"),
        ({"folder": "/tmp"}, "folder is the server's to choose"),
        ({"max_steps": -1}, "max_steps is -1; it must be at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; numbers must be finite"),
        ({"optimizer_args": {"eps": float("inf")}}, "numbers must be finite"),
    ]:
        with pytest.raises(gradwire.InvalidRequestError, match=sentence):
            await service.jobs.submit("sft", good | wrong)
    with pytest.raises(gradwire.InvalidArgumentError, match=r"recipe is 'sgd'; it must be one of sft, dpo"):
        await service.jobs.submit("sgd", good)
    assert await service.files.list() == before
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1", "completion": "2"}\n{"speech": "1"}\nnot json\n')
    with pytest.raises(gradwire.InvalidArgumentError, match=r"2 of 3 rows cannot be used: line 2: .*line 3: not valid"):
        await service.jobs.submit("sft", good | {"data": str(bad)})
    pairs = await service.files.upload(data["pairs"])
    job = await service.jobs.submit("sft", good | {"data": pairs.file_id})  # readable, but not by this recipe
    ended = await service.jobs.wait(job.job_id, timeout=120)
    assert (ended.state, ended.error_code) == ("failed", "invalid_training_file")
    assert ended.error.startswith("pairs.jsonl, line 1: no column is recognised as completion"), ended.error


async def test_answers_of_a_job_on_rewards_are_recorded(service: gradwire.ServiceClient, data: dict[str, Path]) -> None:
    settings = {name: SETTINGS[name] for name in ("model", "max_tokens", "held_out")} | {"data": str(data["talks"])}
    settings |= {"batch_size": 2, "group_size": 4, "answer_tokens": 4, "max_steps": 2, "tags": {"team": "sums"}}
    job = await service.jobs.wait((await service.jobs.submit("grpo", settings)).job_id, timeout=240)
    assert job.state == "succeeded", job.error
    assert [each.step for each in job.checkpoints] == [2], "the one before the first step is no result"
    run = service.get_training_client(job.run_id, takeover=False)
    assert (await run.info()).tags == {"team": "sums"}
    recordings = await run.list_recordings()
    assert [each.number for each in recordings if each.kind == "rollouts"] == [0, 1]
    assert min(each.step for each in recordings if each.kind == "batch") == 0, "the first one, behind samples"
    rollouts = await run.recorded_rollouts(1)
    assert len(rollouts) == 8 and all("number" in each["reason"] for each in rollouts)


async def test_the_commands(server: Server, data: dict[str, Path], tmp_path: Path) -> None:
    def run(*words: str, status: int = 0) -> str:
        environment = {"COLUMNS": "200", "GRADWIRE_API_KEY": None}
        result = CliRunner().invoke(app, ["jobs", *words, "--address", server.address], env=environment)
        assert result.exit_code == status, result.output
        return result.output if status else result.stdout  # a warning may be another test's

    config = tmp_path / "sft.yaml"
    config.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in SETTINGS.items()))

    def all_commands() -> None:
        job_id = run("submit", str(config), "--set", f"data={data['talks']}", "--set", "max_steps=1").strip()
        assert run("wait", job_id) == f"{job_id} has succeeded\n"
        assert job_id in run("list") and "1/1" in run("list")
        shown = run("show", job_id)
        assert "succeeded" in shown and "Step 1/1, training loss=" in shown and "checkpoint run-" in shown
        assert "SFT" in run("logs", job_id, "--follow")
        assert run("delete", job_id) == f"deleted {job_id}\n"
        assert f"there is no job '{job_id}'" in run("show", job_id, status=2)
        assert "did you mean batch_size" in run("submit", str(config), "--set", "batch_siz=2", status=2)
        assert "name a configuration" in run("submit", status=2)
        assert "there is no file absent.yaml" in run("submit", "absent.yaml", status=2)
        assert "there is no recipe 'sgd'; there are sft" in run("submit", str(config), "--recipe", "sgd", status=2)
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        job_id = run("submit", "--script", str(script)).strip()
        run("wait", job_id)
        assert "models: marked" in run("logs", job_id)
        script.write_text("print('first')\nraise ValueError('no luck')")
        job_id = run("submit", "--script", str(script)).strip()
        assert "no luck" in run("wait", job_id, status=1)
        assert "first" in run("logs", job_id).splitlines()  # a line each

    await asyncio.to_thread(all_commands)
