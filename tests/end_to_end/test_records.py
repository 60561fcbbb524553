"""The record of a run, through a real server: written, executed again on its own, tampered with."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gradwire
import pytest
from gradwire_proto.v1 import journal_pb2
from gradwire_server.access.signing import sign
from gradwire_server.checkpoint_files import StoredFile, read_sealed, sealed
from gradwire_server.cli.verify import app
from gradwire_server.journal.segments import Location, Segments
from support.server import Server
from support.tiny import tiny_model
from typer.testing import CliRunner

pytestmark = pytest.mark.long

BATCH = {"input_ids": [[5, 9, 23, 7, 11], [3, 14, 15, 9]]}


@dataclass(frozen=True)
class Recorded:
    """A run's record, and its own words when it was written."""

    file: Path
    model: Path
    run_id: str
    partial: Path
    said: str


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def verify(file: Path, model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return command("gradwire_server.cli", "verify", file, "--model", model, *flags)


def train(run: gradwire.sync.TrainingClient) -> None:
    for _ in range(4):
        run.forward_backward(BATCH, "causal_lm")
        run.optim_step(learning_rate=1e-2)
    run.forward_backward(BATCH, "causal_lm")
    with pytest.raises(gradwire.GradwireError):
        run.train_step({"input_ids": [[5, 10**6]]}, "causal_lm").result()
    run.save_checkpoint("middle")
    run.train_step(BATCH, "causal_lm", learning_rate=1e-2)
    run.forward(BATCH, outputs=["logprobs"]).result()
    run.sample([[5, 9]], max_tokens=3).result()
    run.load_checkpoint("middle").result()
    run.train_step(BATCH, "causal_lm", learning_rate=1e-2).result()


@pytest.fixture(scope="module")
def recorded(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A run that keeps its journal and one that does not, on a server that saves by itself every two steps and is gone
    when this returns."""
    folder = tmp_path_factory.mktemp("records")
    server = Server(tiny_model_path, folder / "state", "--checkpoint-every-steps", "2").start()
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2, dropout=0.1, seed=3, keep_journal=True)
        train(run)
        other = service.create_run("tiny", lora=2, seed=4)
        for _ in range(7):
            other.train_step(BATCH, "causal_lm", learning_rate=1e-2).result()
        other.download_record(folder / "new" / "partial.tar")
        run_id = run.run_id
    done = command("gradwire.cli", "record", run_id, folder / "out.tar", "--sign", "--address", server.address)
    assert done.returncode == 0, done.stderr
    assert server.end() == 0
    yield Recorded(folder / "out.tar", tiny_model_path, run_id, folder / "new" / "partial.tar", done.stdout)


def test_a_record_is_executed_again_from_the_beginning_and_gives_the_same_bits(recorded: Recorded) -> None:
    done = verify(recorded.file, recorded.model)
    assert done.returncode == 0, done.stderr
    # 9 steps and batches, a batch without a step, a forward, a load, and three whole steps but the failed one
    assert "equal, bit for bit: the results of 13 operations" in done.stdout and "tensors of middle" in done.stdout
    assert "operations 1 to 16, signed by ed25519:" in done.stderr


@pytest.mark.slow  # an engine more
def test_a_run_whose_journal_was_trimmed_is_executed_again_from_a_checkpoint(recorded: Recorded) -> None:
    done = verify(recorded.partial, recorded.model)
    assert done.returncode == 0, done.stderr
    assert "equal, bit for bit" in done.stdout and "not signed" in done.stderr
    assert "after the checkpoint at operation" in done.stderr


def changed(recorded: Recorded, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy of the record with files of it changed."""
    with tarfile.open(recorded.file) as archive:
        archive.extractall(folder / "files", filter="data")
    change(folder / "files")
    with tarfile.open(folder / "changed.tar", "w") as archive:
        archive.add(folder / "files", ".")
    return folder / "changed.tar"


def lie(folder: Path) -> None:
    """Claim another loss of the third batch, and make every digest fit."""
    old, new = Segments(folder / "journal"), Segments(folder / "new")
    [number] = old.numbers()
    for found in old.records(number):
        record = journal_pb2.JournalRecord.FromString(found.description)
        if record.seq == 5:
            record.outcome.result.loss.loss += 0.25
        payload = old.read(Location(number, found.location.offset))
        new.append([payload], record.SerializeToString())
    new.close()
    [file] = (folder / "journal").iterdir()
    next((folder / "new").iterdir()).rename(file)
    (folder / "new").rmdir()
    content = read_sealed(folder / "record.json")
    content["files"][f"journal/{file.name}"] = dataclasses.asdict(StoredFile.of(file))
    (folder / "record.json").write_text(sealed(content))


def lie_unsigned(folder: Path) -> None:
    lie(folder)
    (folder / "signature.json").unlink()


@pytest.mark.slow  # an engine more
def test_another_number_is_found_where_it_was_claimed_and_by_how_much(recorded: Recorded, tmp_path: Path) -> None:
    done = verify(changed(recorded, tmp_path, lie_unsigned), recorded.model)
    assert done.returncode == 1
    assert "operation 5 (forward_backward) differs: its loss was" in done.stderr and "(-0.25)" in done.stderr


def flip(folder: Path) -> None:
    [file] = (folder / "journal").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rename(folder: Path) -> None:
    content = read_sealed(folder / "record.json")
    content["config"]["seed"] = "5"
    (folder / "record.json").write_text(json.dumps({"content": content, "blake2b": "0" * 64}))


def smuggle(folder: Path) -> None:
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / "link").symlink_to("/etc/passwd")


@pytest.mark.parametrize(("change", "reason"), [
    (flip, "is not the file that was recorded"),
    (rename, "its checksum does not match"),
    (lie, "changed after it was signed"),
    (smuggle, "link is not a plain file"),
])  # fmt: skip
def test_what_was_tampered_with_is_not_executed(
    recorded: Recorded, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    done = verify(changed(recorded, tmp_path, change), recorded.model)
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr, done.stderr


def said_of(file: Path, *flags: str) -> str:
    """What the command says of a record that it refuses; here, as a process each would take minutes."""
    log, root = logging.getLogger("gradwire_server"), logging.root
    level, handlers = log.level, root.handlers[:]
    done = CliRunner().invoke(app, [str(file), "--model", "none", *flags])
    log.setLevel(level)
    root.handlers[:] = handlers
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done
    return done.stderr


def test_a_changed_byte_is_noticed_in_every_part(recorded: Recorded, tmp_path: Path) -> None:
    """Every file at its ends and middle, and the head of every file in the tar."""
    whole, file = recorded.file.read_bytes(), tmp_path / "changed.tar"
    with tarfile.open(recorded.file) as archive:
        members = [member for member in archive if member.isfile()]
    names = {member.name.partition("/")[0].removeprefix("./") for member in members}
    assert {"record.json", "signature.json", "journal"} <= names
    tried = 0
    for member in members:
        start, size = member.offset_data, member.size
        heads = [member.offset + place for place in (0, 10, 105, 124, 130, 148, 156, 257)]
        for place in {start, start + size // 3, start + size // 2, start + size - 1, *heads}:
            content = bytearray(whole)
            content[place] ^= 2
            file.write_bytes(content)
            said = said_of(file, "--signed-by", "nobody")
            assert "cannot be verified" in said and "it is signed by ed25519" not in said, (member.name, place, said)
            tried += 1
    for size in (0, 100, members[0].offset_data + 10, members[-1].offset_data, len(whole) // 2):
        file.write_bytes(whole[:size])
        assert "cannot be verified" in said_of(file, "--signed-by", "nobody")
    print(f"{tried} changed bytes in {len(members)} files, and 5 shorter records: none was executed")


def test_another_key_signs_in_its_own_name_only(recorded: Recorded, tmp_path: Path) -> None:
    def sign_again(folder: Path) -> None:
        lie(folder)
        signature = sign(tmp_path, (folder / "record.json").read_bytes())
        (folder / "signature.json").write_text(json.dumps(signature))

    def sign_under_the_right_name(folder: Path) -> None:
        right = json.loads((folder / "signature.json").read_text())
        sign_again(folder)
        forged = json.loads((folder / "signature.json").read_text())
        (folder / "signature.json").write_text(json.dumps(forged | {"public_key": right["public_key"]}))

    fingerprint = said_of(recorded.file, "--signed-by", "nobody").partition("ed25519:")[2][:32]
    right = ("--signed-by", f"ed25519:{fingerprint}")
    again = changed(recorded, tmp_path / "again", sign_again)
    assert "it is signed by ed25519:" in said_of(again, *right) and fingerprint not in said_of(
        again, "--signed-by", "x"
    )
    forged = changed(recorded, tmp_path / "forged", sign_under_the_right_name)
    assert "changed after it was signed" in said_of(forged)
    assert "it is signed by nobody" in said_of(changed(recorded, tmp_path / "unsigned", lie_unsigned), *right)


def test_a_strangers_record_stays_in_its_folder_and_size(recorded: Recorded, tmp_path: Path) -> None:
    def lead_out(folder: Path) -> None:
        content = read_sealed(folder / "record.json")
        content["run_id"] = content["origin"]["run_id"] = f"../../../{tmp_path}/outside"
        (folder / "record.json").write_text(sealed(content))
        (folder / "signature.json").unlink()

    assert "is no id of a run" in said_of(changed(recorded, tmp_path / "out", lead_out))
    packed = tmp_path / "packed.tar"
    packed.write_bytes(gzip.compress(recorded.file.read_bytes()))
    assert "not a whole tar file" in said_of(packed)
    holes = tmp_path / "holes.tar"
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    subprocess.run(["tar", "--sparse", "-C", tmp_path, "-cf", holes, "hole"], check=True)
    assert holes.stat().st_size < 1 << 20 and "is not a plain file" in said_of(holes)


@pytest.mark.slow  # an engine more
def test_another_signer_and_another_base_model_are_named(recorded: Recorded, tmp_path: Path) -> None:
    done = verify(recorded.file, tmp_path / "gone")
    assert done.returncode == 2 and "there is no such folder" in done.stderr and "--model tiny=FOLDER" in done.stderr
    done = verify(recorded.file, recorded.model, "--signed-by", "ed25519:00")
    assert done.returncode == 2 and "it is signed by ed25519:" in done.stderr
    done = verify(recorded.file, tiny_model(tmp_path / "other", num_layers=1))
    assert done.returncode == 2 and "its base model has the digest" in done.stderr


@pytest.mark.slow  # an engine more
def test_a_server_that_keeps_no_journal_refuses_to_keep_one(tiny_model_path: Path, tmp_path: Path) -> None:
    server = Server(tiny_model_path, tmp_path / "state", "--durability", "checkpoint").start()
    with gradwire.sync.connect(server.address) as service:
        with pytest.raises(gradwire.InvalidArgumentError, match="--durability checkpoint"):
            service.create_run("tiny", lora=2, keep_journal=True)
        run = service.create_run("tiny", lora=2)
        with pytest.raises(gradwire.UnsupportedError, match="keeps no batches"):
            run.download_record(tmp_path / "out.tar")
        done = command("gradwire.cli", "record", run.run_id, "/proc/out.tar", "--address", server.address)
        assert done.returncode == 2 and "Traceback" not in done.stderr and "/proc/" in done.stderr, done.stderr
    assert server.end() == 0 and not (tmp_path / "out.tar").exists()
