"""Backups taken while a training is under way, and what becomes of a training that goes on from one."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import gradwire
import pytest
from support.server import Server
from support.stage import Stage, wait_for

from tests.faults.conftest import COUNT, SETTINGS, Calm
from tests.faults.test_state_folder import gradwire_command

pytestmark = pytest.mark.long


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    """Stages that are closed with the test."""
    used: list[Stage] = []
    yield used
    for stage in used:
        stage.close()


def backed_up(state: Path, to: Path) -> subprocess.CompletedProcess[str]:
    done = gradwire_command("backup", to, "--state-dir", state)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.faults
def test_a_training_goes_on_from_a_backup_taken_under_load(
    tiny_model_path: Path,
    tmp_path: Path,
    seed: int,
    rng: random.Random,
    left_alone: Callable[[int, int], Calm],
    stages: list[Stage],
) -> None:
    """Three backups at random moments of a training, beside another run that keeps the server busy; the training is not
    disturbed, and from each backup it comes to the same state, bit for bit."""
    calm = left_alone(seed, COUNT)
    stage = Stage(tiny_model_path, tmp_path / "live").start()
    stages.append(stage)
    run_id = stage.create(**SETTINGS)
    busy = threading.Event()

    def load() -> None:
        with gradwire.sync.connect(stage.server.address) as service:
            run = service.create_run("tiny", lora=2)
            while not busy.is_set():
                batches = [run.forward_backward({"input_ids": [[5, 9, 23, 7] * 8]}, "causal_lm") for _ in range(5)]
                run.optim_step()
                run.save_checkpoint("again", overwrite=True).result()
                assert all(batch.result().num_loss_tokens for batch in batches)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        stage.run_client(run_id, seed, COUNT)
        reached = []
        for name, moment in zip("abc", sorted(rng.sample(range(5, COUNT - 10), 3)), strict=True):
            wait_for(f"operation {moment}", lambda moment=moment: stage.got_to(run_id, moment))
            assert "runs" in backed_up(stage.folder / "state", tmp_path / name).stderr
            reached.append(stage.applied(run_id))
        wait_for("the end of the training", stage.finished)
    finally:
        busy.set()
        loading.join()
    assert stage.results() == calm.results
    for name in "abc":
        again = Stage(tiny_model_path, tmp_path / f"again-{name}")
        stages.append(again)
        done = gradwire_command("restore", tmp_path / name, "--state-dir", again.folder / "state")
        assert done.returncode == 0, done.stderr
        again.start()
        again.run_client(run_id, seed, COUNT)
        wait_for("the rest of the training", again.finished)
        results = again.results()
        assert results and all(calm.results[number] == value for number, value in results.items())
        assert again.state_of(run_id) == calm.state
    print(f"backups at operations {reached} of {COUNT}, each restored and trained to the end: the same bits")


@pytest.mark.slow
def test_a_program_that_was_at_work_is_told_of_what_a_restore_undid(
    tiny_model_path: Path, tmp_path: Path, stages: list[Stage]
) -> None:
    stage = Stage(tiny_model_path, tmp_path / "live").start()
    stages.append(stage)
    state, row = stage.folder / "state", {"input_ids": [[5, 9, 23, 7]]}
    with gradwire.sync.connect(stage.server.address) as service:
        run = service.create_run("tiny", lora=2)
        run.forward_backward(row, "causal_lm").result()
        backed_up(state, tmp_path / "copy")
        assert run.optim_step().result().step == 1
        assert stage.server.end() == 0
        shutil.move(state, tmp_path / "lost")
        assert gradwire_command("restore", tmp_path / "copy", "--state-dir", state).returncode == 0
        stage.start()
        with pytest.raises(gradwire.RewoundError, match="went back to operation 1"):
            run.forward_backward(row, "causal_lm").result()
    with gradwire.sync.connect(stage.server.address) as service:
        again = service.get_training_client(run.run_id)
        assert again.optim_step().result().step == 1


def test_what_is_damaged_is_not_restored(tiny_model_path: Path, tmp_path: Path) -> None:
    server = Server(tiny_model_path, tmp_path / "state").start()
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2)
        run.forward_backward({"input_ids": [[5, 9, 23, 7]]}, "causal_lm").result()
        run.save_checkpoint("saved").result()
    assert server.end() == 0
    backed_up(tmp_path / "state", tmp_path / "copy")
    assert gradwire_command("backup", tmp_path / "copy", "--state-dir", tmp_path / "state").returncode == 2
    for part in ("journal/*.segment", "runs/*/checkpoints/saved/weights.safetensors", "gradwire.db", "backup.json"):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(tmp_path / "copy", tmp_path / "damaged")
        file = next(each for each in (tmp_path / "damaged").glob(part) if each.stat().st_size)
        data = bytearray(file.read_bytes())
        middle = len(data) // 2 if part != "gradwire.db" else 8
        data[middle] ^= 1
        file.write_bytes(data)
        done = gradwire_command("restore", tmp_path / "damaged", "--state-dir", tmp_path / "new")
        assert done.returncode == 2 and "Traceback" not in done.stderr, part
        assert not (tmp_path / "new").exists()
    missing = gradwire_command("backup", tmp_path / "other", "--state-dir", tmp_path / "nothing")
    assert missing.returncode == 2 and "is not the state folder of a server" in missing.stderr
