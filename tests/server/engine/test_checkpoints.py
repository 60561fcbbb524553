"""Checkpoints: what they hold, that damage is noticed, that nothing half-written has a name, and who may load them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.checkpoint_files import DamagedCheckpoint, StoredFile
from gradwire_server.engine.state import checkpoints
from gradwire_server.stores import folders
from gradwire_server.stores.folders import FolderStore, _exchange
from gradwire_server.stores.store import Place
from support.engine import LocalEngine, token_rows

BATCH = token_rows([[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60]])


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path}, tmp_path)


def verify(engine: LocalEngine, path: str) -> engine_pb2.EngineReply:
    return engine.request(verify_checkpoint=engine_pb2.EngineVerifyCheckpoint(checkpoint=path))[0]


def test_a_checkpoint_that_is_deleted_while_it_is_read_back_is_missing(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("run-a", lora=2)
    saved = engine.do("run-a", save_checkpoint=pb.SaveCheckpoint()).proto.checkpoint
    read = StoredFile.of

    def deleted(file: Path) -> StoredFile:
        shutil.rmtree(file.parent)
        return read(file)

    monkeypatch.setattr(StoredFile, "of", deleted)
    assert verify(engine, saved.path).error.code == pb.ERROR_CODE_UNKNOWN_CHECKPOINT


@pytest.mark.parametrize("reader", ["read back", "loaded", "a reference"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    engine.create("run-a", lora=2)
    place, newer = (tmp_path / "runs" / "run-a" / "checkpoints" / name for name in ("x", "newer"))
    engine.train("run-a", BATCH)
    assert engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="x")).ok
    shutil.copytree(place, newer)
    engine.train("run-a", BATCH)
    saved = engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="x", overwrite=True)).proto.checkpoint
    expected = engine.logprobs("run-a", BATCH)
    _exchange(newer, place)  # the older of the two is there, until the other takes its place
    check, replaced = StoredFile.check, list[Path]()

    def replace(stored: StoredFile, file: Path) -> None:
        if not replaced:
            replaced.append(file)
            _exchange(newer, place)
            shutil.rmtree(newer)
        check(stored, file)

    monkeypatch.setattr(StoredFile, "check", replace)
    if reader == "read back":
        assert verify(engine, saved.path).result.checkpoint == saved
    elif reader == "loaded":
        engine.train("run-a", BATCH)
        assert engine.do("run-a", load_checkpoint=pb.LoadCheckpoint(checkpoint="x")).ok
        assert np.array_equal(engine.logprobs("run-a", BATCH), expected)
    else:
        pairs = token_rows([[1, 20, 30]], "chosen_input_ids") | token_rows([[1, 3]], "rejected_input_ids")
        call = pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps({"reference_model": saved.path}))
        assert engine.do("run-a", pairs, forward=call).proto.loss.loss == pytest.approx(np.log(2), abs=1e-5)
    assert replaced


def test_a_copy_and_a_reader_of_a_folder_have_one_version_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, place, copy = FolderStore(tmp_path), Place("run", "place"), Place("run", "copy")

    def write(content: str) -> None:
        with store.replacing(place) as folder:
            for name in "ab":
                (folder / name).write_text(content)

    write("old")
    replaced_meanwhile = pytest.raises(DamagedCheckpoint, match="was replaced by a newer one while it was read")
    with replaced_meanwhile, store.reading(place) as folder:
        assert (folder / "a").read_text() == "old"
        write("new")
        assert (folder / "b").read_text() == "new"
    real, copied = folders.link_or_copy, list[str]()

    def replaced(source: str, target: str) -> object:
        copied.append(source)
        if len(copied) == 2:
            write("newest")
        return real(source, target)

    monkeypatch.setattr(folders, "link_or_copy", replaced)
    store.copy(place, copy)
    with store.reading(copy) as folder:
        assert {(folder / name).read_text() for name in "ab"} == {"newest"} and len(copied) > 2


def test_every_flipped_or_torn_byte_is_noticed(engine: LocalEngine, tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    engine.create("run-a", lora=2, head="value")
    engine.train("run-a", BATCH)
    engine.do("run-a", BATCH, forward_backward=pb.LossCall(loss_fn="causal_lm"))
    engine.do("run-a", update_reference=pb.UpdateReference(ema=0.5))
    saved = engine.do("run-a", save_checkpoint=pb.SaveCheckpoint()).proto.checkpoint
    assert saved.name == "step-1"
    before = engine.logprobs("run-a", BATCH)
    folder = tmp_path / "runs" / "run-a" / "checkpoints" / "step-1"
    files = sorted(folder.iterdir())
    assert len(files) == 6
    assert saved.size_bytes == sum(file.stat().st_size for file in files if file.name != "manifest.json")
    assert verify(engine, saved.path).result.checkpoint == saved
    for file in files:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[generator.integers(len(content))] ^= 1 << generator.integers(8)
        torn = content[: generator.integers(len(content))]
        for damaged in (bytes(flipped), torn, None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            error = verify(engine, saved.path).error
            assert (error.code, file.name in error.message) == (pb.ERROR_CODE_CHECKPOINT_CORRUPT, True)
            loaded = engine.op("run-a", load_checkpoint=pb.LoadCheckpoint(checkpoint="step-1")).proto
            assert loaded.error.code == pb.ERROR_CODE_CHECKPOINT_CORRUPT
            file.write_bytes(content)
    assert np.array_equal(engine.logprobs("run-a", BATCH), before)
    assert engine.do("run-a", load_checkpoint=pb.LoadCheckpoint(checkpoint="step-1")).ok


def test_a_save_that_fails_leaves_the_old_one_and_no_rubbish(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("run-a", lora=2)
    first = engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="x", note="first")).proto.checkpoint
    again = engine.op("run-a", save_checkpoint=pb.SaveCheckpoint(name="x")).proto.error
    assert (again.code, again.field) == (pb.ERROR_CODE_ALREADY_EXISTS, "name")
    parent = tmp_path / "runs" / "run-a" / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        full = engine.op("run-a", save_checkpoint=pb.SaveCheckpoint(name="x", overwrite=True)).proto.error
    assert full.code == pb.ERROR_CODE_STORAGE_FULL
    assert [entry.name for entry in parent.iterdir()] == ["x"]
    assert verify(engine, "run-a/x").result.checkpoint == first
    (parent / ".new-left-by-a-crash").mkdir()
    second = engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="x", overwrite=True)).proto.checkpoint
    assert [entry.name for entry in parent.iterdir()] == ["x"]
    assert second.seq > first.seq and verify(engine, "run-a/x").result.checkpoint == second


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every sync, what carries the name is complete: the old content, or the new."""
    store, place = FolderStore(tmp_path), tmp_path / "run" / "place"
    place.parent.mkdir()
    seen: list[str] = []
    sync = os.fsync

    def watch(descriptor: int) -> None:
        seen.append((place / "a").read_text() + (place / "b").read_text() if place.exists() else "")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    for content in ("old", "new"):
        with store.replacing(Place("run", "place")) as folder:
            (folder / "a").write_text(content)
            (folder / "b").write_text(content)
    assert seen == ["", "", "", "oldold", "oldold", "oldold", "oldold", "newnew"]
    assert [entry.name for entry in place.parent.iterdir()] == ["place"]


def test_weights_only_starts_the_optimizer_anew(engine: LocalEngine) -> None:
    engine.create("run-a", lora=4, seed=1)
    start = engine.logprobs("run-a", BATCH)
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="start"))
    first = [engine.train("run-a", BATCH) for _ in range(3)]
    engine.do("run-a", BATCH, forward_backward=pb.LossCall(loss_fn="causal_lm"))
    engine.do("run-a", load_checkpoint=pb.LoadCheckpoint(checkpoint="start", weights_only=True))
    assert np.array_equal(engine.logprobs("run-a", BATCH), start)
    assert [engine.train("run-a", BATCH) for _ in range(3)] == first
    assert engine.context.runs["run-a"].step == 6


@pytest.mark.long
def test_forks_take_the_weights_and_if_asked_the_optimizer_and_may_change_the_head(engine: LocalEngine) -> None:
    for lora in (4, None):
        engine.create("run-a", lora=lora, seed=1, head="value")
        for _ in range(2):
            engine.train("run-a", BATCH)
        engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="sft", overwrite=True))
        goes_on = engine.train("run-a", BATCH)
        warm = engine.create("run-warm", lora=lora, seed=8, head="value", checkpoint="run-a/sft").run_created
        assert (warm.step, warm.seq) == (2, 0)
        assert engine.train("run-warm", BATCH) == goes_on
        cold = engine.create("run-cold", lora=lora, head="value", checkpoint="run-a/sft", weights_only=True)
        assert (cold.run_created.step, cold.run_created.seq) == (0, 0)
        assert engine.train("run-cold", BATCH) == goes_on
        assert engine.train("run-cold", BATCH) != engine.train("run-warm", BATCH)
        for with_optimizer in (True, False):
            fork = {"checkpoint": "run-a/sft", "weights_only": not with_optimizer, "fresh_head": True}
            reply = engine.create("run-rm", lora=lora, head="reward", **fork)
            assert not reply.HasField("error"), reply.error
            assert engine.train("run-rm", BATCH) == goes_on
        same = engine.create("run-same", lora=lora, head="reward", checkpoint="run-a/sft", weights_only=True)
        assert same.run_created.head == "value" and engine.train("run-same", BATCH) == goes_on


def test_a_run_of_another_kind_refuses_and_stays_as_it_is(engine: LocalEngine) -> None:
    engine.create("run-lora", lora=4)
    engine.do("run-lora", save_checkpoint=pb.SaveCheckpoint(name="x"))
    for number, lora in enumerate((None, 8, {"rank": 4, "alpha": 1.0})):
        run = f"run-{number}"
        engine.create(run, lora=lora)
        before = engine.logprobs(run, BATCH)
        error = engine.op(run, load_checkpoint=pb.LoadCheckpoint(checkpoint="run-lora/x")).proto.error
        assert (error.code, error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "checkpoint")
        assert np.array_equal(engine.logprobs(run, BATCH), before)
