"""The journal's second copy: either copy alone is enough, and what is damaged in one is taken from the other."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.mirror import reconcile
from support.server import Server
from support.stage import Stage, kill, wait_for

from tests.faults.conftest import COUNT, SETTINGS, Calm
from tests.faults.test_state_folder import DATABASE, refusal
from tests.server.journal.test_journal import append, new_run, operation


@pytest.fixture
def mirrored(tiny_model_path: Path, tmp_path: Path) -> Iterator[Stage]:
    """A stage with a mirror; its server takes no checkpoints, so that everything is in the journal."""
    mirror = ("--mirror", str(tmp_path / "mirror"), "--checkpoint-every-steps", "0")
    stage = Stage(tiny_model_path, tmp_path / "stage", *mirror).start()
    yield stage
    stage.close()


def flip_a_bit(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@pytest.mark.slow
def test_either_copy_is_enough(
    mirrored: Stage, tmp_path: Path, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    """A training whose server is killed three times: the first copy is lost, then the second, then a bit of every file
    changes in one or the other. It ends bit for bit as one that was left alone."""
    calm, state, mirror = left_alone(seed, COUNT), mirrored.folder / "state", tmp_path / "mirror"
    run_id = mirrored.create(**SETTINGS)
    mirrored.run_client(run_id, seed, COUNT)
    losses = (state, mirror, None)
    for moment, lost in zip(sorted(rng.sample(range(5, 90), 3)), losses, strict=True):
        wait_for(f"operation {moment}", lambda moment=moment: mirrored.got_to(run_id, moment))
        kill(mirrored.server.process.pid)
        mirrored.server.process.wait()
        if lost is not None:
            shutil.rmtree(lost / "journal")
            for name in DATABASE:
                (lost / name).unlink(missing_ok=True)
        else:
            for file in sorted((state / "journal").iterdir()):
                if file.stat().st_size:
                    flip_a_bit(rng.choice([file, mirror / "journal" / file.name]), rng)
            (rng.choice([state, mirror]) / "gradwire.db").write_bytes(b"no database")
        mirrored.restart_server()
    wait_for("the end of the training", mirrored.finished)
    assert mirrored.results() == calm.results
    state_now = mirrored.state_of(run_id)
    names = {name for name in calm.state if name.endswith(".safetensors")}
    assert {name: state_now[name] for name in names} == {name: calm.state[name] for name in names}


@pytest.mark.faults
def test_the_mirror_of_another_folder_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        server = Server(tiny_model_path, tmp_path / name, "--mirror", str(tmp_path / f"mirror-{name}")).start()
        assert server.end() == 0
    said = refusal(tiny_model_path, tmp_path / "one", "--mirror", str(tmp_path / "mirror-two"))
    assert "mirrors the journal of another state folder" in said


async def test_a_mirror_that_fails_stops_nothing_and_is_brought_up_to_date_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, mirror, real = tmp_path / "state", tmp_path / "mirror", os.fsync

    def fsync(fd: int) -> None:
        if str(mirror) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error (injected)")
        real(fd)

    def contents(folder: Path) -> dict[str, Any]:
        return {file.name: file.read_bytes() for file in (folder / "journal").iterdir()}

    reconcile(state, mirror)
    journal = await Journal.open(state, mirror=mirror)
    run_id = await new_run(journal, state)
    await append(journal, operation(run_id, 1, size=3), b"abc")
    assert contents(state) == contents(mirror)
    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fsync)
        await append(journal, operation(run_id, 2, size=3), b"def")
    await append(journal, operation(run_id, 3, size=3), b"ghi")
    assert "the journal goes on alone" in caplog.text
    await journal.close()
    assert contents(state) != contents(mirror)
    reconcile(state, mirror)
    assert contents(state) == contents(mirror)
    shutil.rmtree(state)
    reconcile(state, mirror)
    journal = await Journal.open(state, mirror=mirror)
    entries = await journal.entries(run_id, 0, 10)
    assert [await journal.payload(entry.location) for entry in entries if entry.location] == [b"abc", b"def", b"ghi"]
    await journal.close()
