"""State folders whose database is gone, old, or of another version: nothing is lost by starting a server on them."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire_server.journal.schema import connect
from support.make_state_folder import ROW, file_contents, model_of, train
from support.server import Server, free_port
from support.stage import Stage, kill, wait_for
from support.tinker import HttpServer

from tests.faults.conftest import COUNT, SETTINGS, Calm

pytestmark = pytest.mark.long

STATES = Path(__file__).parent / "states"
DATABASE = ("gradwire.db", "gradwire.db-wal", "gradwire.db-shm")


def gradwire_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire_server.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def refusal(model: Path, state: Path, *flags: str) -> str:
    """What a server says that does not start on a folder, which it leaves as it was."""
    before = files(state)
    ended = gradwire_command(
        "serve", "--model", f"tiny={model}", "--state-dir", state, "--address", "127.0.0.1:0", *flags
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert files(state) == before
    return ended.stderr


def files(state: Path) -> dict[str, int]:
    """Every file that matters and its size."""
    passing = ("gradwire.db-wal", "gradwire.db-shm", "lock")
    return {
        str(path.relative_to(state)): path.stat().st_size
        for path in state.rglob("*")
        if path.is_file() and path.name not in passing
    }


def killed_at_work(
    stage: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> tuple[str, Calm]:
    """A run whose server was killed somewhere in it, with its client still waiting."""
    calm = left_alone(seed, COUNT)
    run_id = stage.create(**SETTINGS)
    stage.run_client(run_id, seed, COUNT)
    somewhere = rng.randrange(10, 90)
    wait_for(f"operation {somewhere}", lambda: stage.got_to(run_id, somewhere))
    return run_id, calm


def goes_on(stage: Stage, run_id: str, calm: Calm) -> None:
    """The client gets its results, and the state becomes what it becomes when nothing happens."""
    stage.restart_server()
    wait_for("the rest of the loop", stage.finished)
    assert stage.results() == calm.results
    assert stage.state_of(run_id) == calm.state


Begin = Callable[[Server], Server]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a server that is ended with the test, whatever becomes of it."""
    begun: list[Server] = []

    def start(server: Server) -> Server:
        begun.append(server)
        return server.start()

    yield start
    for server in begun:
        if server.process.poll() is None:
            server.end()


@pytest.fixture
def own_stage(tiny_model_path: Path, tmp_path: Path) -> Any:
    stage = Stage(tiny_model_path, tmp_path / "stage").start()
    yield stage
    stage.close()


@pytest.mark.long
def test_a_missing_database_is_refused_and_rebuilt_bit_for_bit(
    own_stage: Stage, tiny_model_path: Path, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    stage, state = own_stage, own_stage.folder / "state"
    run_id, calm = killed_at_work(stage, seed, rng, left_alone)
    kill(stage.server.process.pid)
    stage.server.process.wait()
    for name in DATABASE:
        (state / name).unlink(missing_ok=True)
    said = refusal(tiny_model_path, state)
    assert "gradwire.db is missing" in said and "segments of a journal and the folders of 1 runs" in said
    assert "gradwire repair --state-dir" in said
    done = gradwire_command("repair", "--state-dir", state)
    assert done.returncode == 0 and run_id in done.stderr and "rebuilt with 1 runs" in done.stderr
    goes_on(stage, run_id, calm)


@pytest.mark.faults
@pytest.mark.parametrize("whole", [True, False], ids=["all segments", "a segment less"])
def test_an_old_copy_of_the_database_is_brought_up_to_date_or_refused_and_rebuilt_bit_for_bit(
    own_stage: Stage,
    tiny_model_path: Path,
    tmp_path: Path,
    seed: int,
    rng: random.Random,
    left_alone: Callable[[int, int], Calm],
    whole: bool,
) -> None:
    stage, state = own_stage, own_stage.folder / "state"
    run_id, calm = killed_at_work(stage, seed, rng, left_alone)
    with (
        closing(sqlite3.connect(state / "gradwire.db")) as live,
        closing(sqlite3.connect(tmp_path / "copy.db")) as copy,
    ):
        live.backup(copy)
    reached = stage.applied(run_id)
    wait_for("a few more operations", lambda: stage.got_to(run_id, min(reached + 5, COUNT)))
    kill(stage.server.process.pid)
    stage.server.process.wait()
    for name in DATABASE:
        (state / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", state / "gradwire.db")
    if whole:  # the segments say what the copy lacks
        goes_on(stage, run_id, calm)
        return
    with closing(connect(state / "gradwire.db")) as database:
        database.execute("UPDATE runs SET commits = commits - 100")  # older than the oldest segment
        database.execute("UPDATE state SET commits = commits - 100")
    said = refusal(tiny_model_path, state)
    assert "is an older copy: it ends at commit" in said and "gradwire repair" in said
    done = gradwire_command("repair", "--state-dir", state)
    assert done.returncode == 0 and "the database that was there is gradwire.db.before-" in done.stderr
    goes_on(stage, run_id, calm)


@pytest.mark.faults
def test_a_database_from_before_a_run_is_refused(tiny_model_path: Path, tmp_path: Path, begin: Begin) -> None:
    state = tmp_path / "state"
    server = begin(Server(tiny_model_path, state))
    assert server.end() == 0
    shutil.copy(state / "gradwire.db", tmp_path / "copy.db")
    server.start()
    with gradwire.sync.connect(server.address) as service:
        run_id = service.create_run("tiny", lora=2).run_id
    assert server.end() == 0
    for name in DATABASE:
        (state / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", state / "gradwire.db")
    shutil.rmtree(state / "journal")  # else the segments would say what the copy lacks
    assert run_id in refusal(tiny_model_path, state)


@pytest.mark.faults
def test_a_rebuilt_database_knows_what_failed_and_who_may_read(
    tiny_model_path: Path, tmp_path: Path, begin: Begin
) -> None:
    state = tmp_path / "state"
    server = begin(Server(tiny_model_path, state))
    row = {"input_ids": [[5, 9, 23, 7]]}
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2, name="mine", tags={"a": "b"})
        run.forward_backward(row, "causal_lm").result()
        scored = run.forward(row, outputs=["logprobs"]).result()
        with pytest.raises(gradwire.GradwireError):
            run.load_checkpoint("none").result()
        step = run.optim_step(learning_rate=1e-2).result()
        later = run.forward(row, outputs=["logprobs"]).result()
        assert later.outputs["logprobs"][0].tolist() != scored.outputs["logprobs"][0].tolist()
        measured = run.history()
    assert server.end() == 0
    said = gradwire_command("repair", "--state-dir", state)  # what only the database holds is taken over
    assert said.returncode == 0 and "lost" not in said.stderr
    with closing(sqlite3.connect(state / "gradwire.db")) as database:
        assert database.execute("SELECT count(*) FROM computed_with WHERE run_id = ?", (run.run_id,)).fetchone() == (1,)
    server.start()
    with gradwire.sync.connect(server.address) as service:
        again = service.get_training_client(run.run_id).history()
        assert again.seq.tolist() == measured.seq.tolist() and again.time.tolist() == measured.time.tolist()
        assert again.loss.tolist()[0] == measured.loss.tolist()[0]
    assert server.end() == 0
    for name in DATABASE:
        (state / name).unlink(missing_ok=True)
    said = gradwire_command("repair", "--state-dir", state)
    assert said.returncode == 0
    assert f"{run.run_id}: what it was computed with was in the old database only, and is lost" in said.stderr
    server.start()
    with gradwire.sync.connect(server.address) as service:
        [info] = service.list_runs()
        assert (info.run_id, info.name, dict(info.tags), info.step) == (run.run_id, "mine", {"a": "b"}, step.step)
        again = service.get_training_client(run.run_id)
        last = again.forward(row, outputs=["logprobs"]).result()
        assert last.outputs["logprobs"][0].tolist() == later.outputs["logprobs"][0].tolist()
    assert server.end() == 0


@pytest.mark.long
@pytest.mark.parametrize("version", [1, 9])
def test_a_folder_of_an_earlier_version_goes_on(
    version: int, tiny_model_path: Path, tmp_path: Path, begin: Begin
) -> None:
    """Version 1 was the first release's; until 9, commits repeated their records. See ``make_state_folder.py``."""
    with tarfile.open(STATES / f"{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_text())
    server = begin(Server(tiny_model_path, tmp_path / "state", "--threads", "1", "--accept-changes"))
    with gradwire.sync.connect(server.address) as service:
        runs = {info.run_id: info for info in service.list_runs()}
        assert set(runs) == {expected["run_id"], expected["other_run_id"]}
        assert runs[expected["run_id"]].step == expected["step"]
        run = service.get_training_client(expected["run_id"])
        loss = run.forward_backward({"input_ids": [[5, 9, 23, 7, 40, 11]]}, "causal_lm").result().loss
        assert 0 < loss < expected["losses"][-1]
        assert run.optim_step().result().step == expected["step"] + 1
        assert [each.name for each in run.list_checkpoints()] == ["three"]
    assert server.end() == 0
    with closing(sqlite3.connect(tmp_path / "state" / "gradwire.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone()[0] > version


@pytest.mark.slow  # a job's worker
def test_a_folder_of_the_last_landing_goes_on(tmp_path: Path, begin: Begin) -> None:
    """Killed with operations queued, in the middle of a job; see ``make_state_folder.py``."""
    with tarfile.open(STATES / "11.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_text())
    flags = ("--threads", "1", "--accept-changes")
    server = HttpServer(model_of(tmp_path), tmp_path / "state", free_port(), *flags)
    begin(server)
    with gradwire.sync.connect(server.address) as service:
        runs = {info.run_id: info for info in service.list_runs()}
        named = {expected[f"{name}run_id"] for name in ("", "other_", "parts_", "queued_")}
        assert named <= set(runs) and not any(info.parked for info in runs.values())
        run = service.get_training_client(expected["run_id"])
        assert train(run, 1)[0] < expected["losses"][-1] and run.info().step == expected["step"] + 1
        run.load_checkpoint(f"{expected['run_id']}/three").result()
        assert train(run, 1) == pytest.approx(expected["losses"][3:4], rel=1e-4)
        queued = service.get_training_client(expected["queued_run_id"])
        wait_for("what was queued", lambda: queued.info().step == expected["queued"])
        parts = service.get_training_client(expected["parts_run_id"])
        labelled = {"input_ids": [ROW, ROW], "label": [0.0, 1.0]}
        last = parts.forward_backward(labelled, "bco", {"reference_model": "base"}).result()
        assert last.num_tokens == 3 * len(ROW)
        assert expected["files"].items() <= file_contents(server.url).items()  # the job may have written its results
        session = service.sessions.get(expected["session_id"])
        assert [turn.text for turn in session.rollout().turns] == [expected["said"]]
        job = service.jobs.wait(expected["job_id"], timeout=240)
        assert (job.state, job.step) == ("succeeded", expected["job_steps"]), job.error
    assert server.end() == 0


def test_a_folder_that_is_no_state_folder_is_not_made_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = gradwire_command("repair", "--state-dir", tmp_path)
    assert said.returncode == 2 and "is not the state folder of a server: it has no gradwire.db, runs or" in said.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow  # two starts
def test_a_folder_of_version_1_without_its_database_keeps_its_checkpoints(
    tiny_model_path: Path, tmp_path: Path, begin: Begin
) -> None:
    with tarfile.open(STATES / "1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for name in DATABASE:
        (tmp_path / "state" / name).unlink()
    assert "gradwire.db is missing" in refusal(tiny_model_path, tmp_path / "state")
    done = gradwire_command("repair", "--state-dir", tmp_path / "state")
    assert done.returncode == 0 and "records of version 1" in done.stderr and "as far as is known" in done.stderr
    run_id = json.loads((tmp_path / "expected.json").read_text())["run_id"]
    server = begin(Server(tiny_model_path, tmp_path / "state"))
    with gradwire.sync.connect(server.address) as service:
        run = service.get_training_client(run_id)
        assert run.info().step == 3
        run.forward_backward({"input_ids": [[5, 9, 23, 7]]}, "causal_lm").result()
        assert run.optim_step().result().step == 4
    assert server.end() == 0


@pytest.mark.long
def test_a_newer_folder_is_refused_in_a_sentence(tiny_model_path: Path, tmp_path: Path, begin: Begin) -> None:
    server = begin(Server(tiny_model_path, tmp_path / "state"))
    assert server.end() == 0
    with closing(sqlite3.connect(tmp_path / "state" / "gradwire.db")) as database:
        database.execute("PRAGMA user_version = 1000")
    said = refusal(tiny_model_path, tmp_path / "state")
    assert "a newer gradwire wrote it (version 1000 of the state folder" in said


SUBMIT_AND_DIE = """
import asyncio, os, sys
import gradwire

async def main():
    service = await gradwire.connect(sys.argv[1])
    run = await service.get_training_client(sys.argv[2])
    run.forward_backward({"input_ids": [[5, 9, 23, 7]]}, "causal_lm")
    while (await run.info()).accepted_seq < 1:
        await asyncio.sleep(0.01)
    os._exit(9)

asyncio.run(main())
"""
JUMPED = """
import sys
import time
from pathlib import Path

real, jump = time.time, Path(sys.argv.pop(1))
time.time = lambda: real() + (float(jump.read_text()) if jump.exists() else 0.0)

from gradwire_server.scheduling import scheduler
from gradwire_server.cli.app import main

scheduler.COLLECT_EVERY_S = 0.1
main()
"""


class JumpingServer(Server):
    """A server whose wall clock is ahead by what a file says, and which looks for old results all the time."""

    def __init__(self, model: Path, state_dir: Path, jump: Path, *args: str) -> None:
        super().__init__(model, state_dir, *args)
        self._command[1:3] = ["-c", JUMPED, str(jump)]


@pytest.mark.slow  # two starts
def test_a_wall_clock_that_jumps_by_weeks_keeps_results(tiny_model_path: Path, tmp_path: Path, begin: Begin) -> None:
    jump = tmp_path / "jump"
    server = begin(JumpingServer(tiny_model_path, tmp_path / "state", jump))
    with gradwire.sync.connect(server.address) as service:
        run_id = service.create_run("tiny", lora=2).run_id
    loop = [sys.executable, "-c", SUBMIT_AND_DIE, server.address, run_id]
    assert subprocess.run(loop, timeout=60).returncode == 9
    jump.write_text(str(3 * 7 * 86400))
    with gradwire.sync.connect(server.address) as service:
        wait_for("the result", lambda: service.get_training_client(run_id).info().applied_seq == 1)
        time.sleep(1.0)  # ten looks for old results
        [(seq, future)] = service.get_training_client(run_id).earlier_operations().items()
        assert seq == 1 and future.result().num_loss_tokens == 3
    assert server.end() == 0
