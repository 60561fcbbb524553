"""Copies of a state folder: one that is taken while its server runs, and a folder made from one.

A copy holds the database as it was at one moment, brought up to date with the segments, the records that its rows refer
to, and the checkpoints that it lists. Files that no longer change are linked, not copied, where the copy is on the same
file system. Checkpoints that are in a store (``gradwire serve --store``) stay there; the copy says where, and it is
checked that they are there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire_proto.v1 import jobs_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.signing import SIGNING_KEY
from gradwire_server.checkpoint_files import MANIFEST, ORIGIN, DamagedCheckpoint, read_manifest, read_sealed, sealed
from gradwire_server.durable_files import make_folder, sync, sync_tree
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.run_files import RUN_FILE
from gradwire_server.journal.schema import check_version, connect, version_of
from gradwire_server.journal.segments import CorruptRecord, Segments
from gradwire_server.journal.state_folder import DATABASE, RUNS, SEGMENTS, StateFolderError
from gradwire_server.stores.claim import NOTE as CLAIM
from gradwire_server.stores.claim import claim_of
from gradwire_server.stores.claim import stored as open_claimed
from gradwire_server.stores.store import CHECKPOINTS, Place, Store, saved_place

NOTE = "backup.json"
FILES, JOBS = "files", "jobs"
DOOR_DATABASES = ("tinker.db",)
"""Databases of the doors, beside the runs."""
EPOCHS = 1 << 20
"""How far the epochs of restored runs are ahead of those in the copy: above any that was given out since."""
TRIES = 5
COPY_BYTES = 8 << 20


class _Changed(Exception):
    """The folder changed so much during the copy that it must be taken again."""


@dataclass(frozen=True)
class Copied:
    """Contents of a copy.

    Attributes:
        damaged: Checkpoints and files that are damaged where they are, for which it is not restored.
    """

    runs: int
    checkpoints: int
    operations: int
    size_bytes: int
    damaged: int = 0


def backup(state_dir: Path, to: Path, say: Callable[[str], object]) -> Copied:
    """Copy a state folder, whose server may run.

    Args:
        to: The folder to make.
        say: Called with a sentence for each checkpoint that is damaged in the folder itself.

    Raises:
        StateFolderError: There is nothing to copy, ``to`` is in use, or a record or a
            checkpoint is damaged or changes too fast.
    """
    if not (state_dir / DATABASE).exists():
        raise StateFolderError(f"{state_dir} is not the state folder of a server: it has no {DATABASE}")
    _check_free(to)
    partial = to.with_name(f"{to.name}.partial")
    reason = ""
    for _ in range(TRIES):
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial, 0o700)
        try:
            copied = _copy(state_dir, partial, say)
        except _Changed as change:
            reason = str(change)
            continue
        note = {"made_at": time.time(), "state_dir": str(state_dir), "store": claim_of(state_dir).url}
        (partial / NOTE).write_text(sealed(note))
        _finish(partial, to)
        return copied
    shutil.rmtree(partial, ignore_errors=True)
    raise StateFolderError(f"{state_dir} could not be copied as one state, {TRIES} times: {reason}")


def restore(copy: Path, state_dir: Path, say: Callable[[str], object]) -> Copied:
    """Make a state folder from a copy, whose every byte is checked first.

    Args:
        copy: A folder made by :func:`backup`; it stays as it is.
        state_dir: The folder to make.
        say: Called with a sentence for each checkpoint that is no longer in the store.

    Raises:
        StateFolderError: ``copy`` is no copy or is damaged, or ``state_dir`` is in use.
    """
    try:
        read_sealed(copy / NOTE)
    except (OSError, ValueError, KeyError, TypeError):
        raise StateFolderError(f"{copy} is not a backup: its {NOTE} is missing or cannot be read") from None
    _check_free(state_dir)
    partial = state_dir.with_name(f"{state_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(copy, partial, ignore=shutil.ignore_patterns(NOTE))
    try:
        copied = _check(partial, say, damaged=False)
        with closing(connect(partial / DATABASE)) as database:
            # Clients that were at work know another history: they are fenced.
            database.execute("UPDATE runs SET epoch = epoch + ?, writer = ''", (EPOCHS,))
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except (_Changed, sqlite3.DatabaseError) as error:
        shutil.rmtree(partial)
        raise StateFolderError(f"{copy} is damaged and was not restored: {error}") from error
    _finish(partial, state_dir)
    return copied


def _copy(state_dir: Path, partial: Path, say: Callable[[str], object]) -> Copied:
    """Copy in an order in which nothing that the database refers to can be missing.

    What may be deleted meanwhile is linked before the database is copied, what was added meanwhile after it.
    """
    for folder in _saved_folders(state_dir / RUNS):
        _link_folder(folder, partial / folder.relative_to(state_dir))
    for file in _contents(state_dir):
        (partial / FILES).mkdir(exist_ok=True)
        _link(file, partial / FILES)
    _copy_jobs(state_dir / JOBS, partial / JOBS)
    source, target = state_dir / SEGMENTS, partial / SEGMENTS
    target.mkdir()
    numbers = Segments(source).numbers()
    for number in numbers[:-1]:
        if _is_whole(Segments(source), number):
            _link(source / f"{number:08d}.segment", target)
    with closing(connect(state_dir / DATABASE)) as live, closing(connect(partial / DATABASE)) as database:
        check_version(live)
        live.backup(database)
    for number in Segments(source).numbers():
        if not (target / f"{number:08d}.segment").exists():
            _copy_whole(source, target, number)
    bring_up_to_date(partial / DATABASE, Segments(target))
    with closing(connect(partial / DATABASE)) as database:
        runs = [run_id for (run_id,) in database.execute("SELECT run_id FROM runs WHERE ready = 1")]
        listed = {f"{run_id}/{name}" for run_id, name in database.execute("SELECT run_id, name FROM checkpoints")}
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for file in _contents(state_dir):
        (partial / FILES).mkdir(exist_ok=True)
        _link(file, partial / FILES)
    for run_id in runs:
        (partial / RUNS / run_id).mkdir(parents=True, exist_ok=True)
        _link(state_dir / RUNS / run_id / RUN_FILE, partial / RUNS / run_id)
    for path in listed:
        run_id, _, name = path.partition("/")
        place = Path(RUNS, run_id, "checkpoints", name)
        if not (partial / place).exists():
            _link_folder(state_dir / place, partial / place)
    for folder in list(_saved_folders(partial / RUNS)):
        run_id, kind, name = folder.parts[-3:]
        if run_id not in runs or (kind == "checkpoints" and name != ORIGIN and f"{run_id}/{name}" not in listed):
            shutil.rmtree(folder)
    for folder in (partial / RUNS).glob("*"):
        if folder.name not in runs:
            shutil.rmtree(folder)
    for name in ("keys.json", SIGNING_KEY, CLAIM):
        if (state_dir / name).exists():
            shutil.copy2(state_dir / name, partial / name)
    for name in DOOR_DATABASES:
        if (state_dir / name).exists():
            with closing(sqlite3.connect(state_dir / name)) as live, closing(sqlite3.connect(partial / name)) as copied:
                live.backup(copied)
    return _check(partial, say, damaged=True)


def _check(copy: Path, say: Callable[[str], object], *, damaged: bool) -> Copied:
    """Read everything that a copy's database refers to, byte by byte; in a store, compare sizes.

    Args:
        say: Called for a checkpoint that is not whole in the store, which has nothing to do with the copy.
        damaged: Also call it for a damaged checkpoint or file, and count them; otherwise the first is an error.

    Raises:
        _Changed: Something is missing or damaged.
    """
    segments, runs, whole = Segments(copy / SEGMENTS), copy / RUNS, set[tuple[int, int]]()
    for number in segments.numbers():
        try:
            whole |= {(number, record.location.offset) for record in segments.records(number)}
        except CorruptRecord as error:
            raise _Changed(f"segment {number:08d}: {error}") from error
    with closing(connect(copy / DATABASE)) as database:
        [(verdict,)] = database.execute("PRAGMA quick_check(1)").fetchall()
        if verdict != "ok":
            raise _Changed(f"{DATABASE}: {verdict}")
        query = " UNION ALL ".join(
            f"SELECT segment, offset FROM {table} WHERE offset IS NOT NULL" for table in ("operations", "results")
        )
        missing = set(database.execute(query)) - whole
        if missing:
            raise _Changed("segment {:08d} has no record at {}".format(*min(missing)))
        rows = database.execute("SELECT run_id, checkpoint FROM checkpoints").fetchall()
        rows_of_files = database.execute("SELECT file FROM files").fetchall() if version_of(database) >= 7 else []
        [(num_runs,)] = database.execute("SELECT count(*) FROM runs").fetchall()
        [(operations,)] = database.execute("SELECT count(*) FROM operations").fetchall()
    store, found = open_claimed(copy), 0
    for run_id, raw in rows:
        name = pb.Checkpoint.FromString(raw).name
        if store is not None:
            if wrong := _not_whole(store, saved_place(run_id, CHECKPOINTS, name)):
                say(f"checkpoint {run_id}/{name} is not in {claim_of(copy).url} as it was saved: {wrong}")
            continue
        folder = runs / run_id / "checkpoints" / name
        try:
            for file, saved in read_manifest(folder).files.items():
                saved.check(folder / file)
        except FileNotFoundError as error:
            raise _Changed(f"checkpoint {run_id}/{name} is missing") from error
        except DamagedCheckpoint as error:
            if not damaged:
                raise _Changed(f"checkpoint {run_id}/{name}: {error}") from error
            say(f"checkpoint {run_id}/{name} is damaged where it is, and so in the backup: {error}")
            found += 1
    for (raw,) in rows_of_files:
        stored_file = jobs_pb2.File.FromString(raw)
        with suppress(FileNotFoundError), (copy / FILES / stored_file.digest.hex()).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").digest() == stored_file.digest:
                continue
        if not damaged:
            raise _Changed(f"the file {stored_file.file_id} ({stored_file.filename}) is damaged or missing")
        say(f"the file {stored_file.file_id} ({stored_file.filename}) is damaged where it is, and so in the backup")
        found += 1
    size = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file())
    return Copied(num_runs, len(rows), operations, size, found)


def _not_whole(store: Store, place: Place) -> str:
    """Describe what is wrong with a checkpoint in a store, by its manifest and file sizes; empty if nothing is."""
    try:
        with store.reading(place, MANIFEST) as folder:
            expected = {file: stored.size for file, stored in read_manifest(folder).files.items()}
    except FileNotFoundError:
        return "it is missing"
    except DamagedCheckpoint as error:
        return str(error)
    found = store.sizes(place)
    wrong = sorted(file for file, size in expected.items() if found.get(file) != size)
    return f"{wrong[0]} has {found.get(wrong[0], 0)} of {expected[wrong[0]]} bytes" if wrong else ""


def _is_whole(segments: Segments, number: int) -> bool:
    """Whether a segment can be read to its end; a crash may have torn its last record."""
    try:
        return sum(1 for _ in segments.records(number)) >= 0
    except CorruptRecord:
        return False


def _saved_folders(runs: Path) -> Iterator[Path]:
    """The folders of checkpoints and exports; unfinished ones begin with a dot."""
    for kind in ("checkpoints", "exports"):
        yield from (folder for folder in runs.glob(f"*/{kind}/*") if not folder.name.startswith("."))


def _contents(state_dir: Path) -> list[Path]:
    """The contents of files; unfinished ones begin with a dot."""
    return [file for file in (state_dir / FILES).glob("*") if not file.name.startswith(".")]


def _copy_jobs(jobs: Path, to: Path) -> None:
    """Copy what a job's recipe goes on from: its position, which names a checkpoint, and what it has written.

    This is before the database is copied, so that the checkpoint is in the copy. What is left out is made again.
    """
    for folder in jobs.glob("*"):
        (to / folder.name).mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*"):
            if file.suffix in (".json", ".jsonl", ".log", ".csv", ".html"):
                with suppress(FileNotFoundError):
                    shutil.copy2(file, to / folder.name)


def _link_folder(folder: Path, to: Path) -> None:
    """Link a complete folder's files; nothing is left of one that is deleted meanwhile."""
    try:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = to / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(file, place.parent)
    except FileNotFoundError:
        shutil.rmtree(to, ignore_errors=True)


def _link(file: Path, folder: Path) -> None:
    place = folder / file.name
    if place.exists():
        return
    try:
        os.link(file, place)
    except FileNotFoundError:
        return  # deleted meanwhile: what needs it is found missing by the check
    except OSError:  # another file system
        shutil.copy2(file, place)


def _copy_whole(source: Path, target: Path, number: int) -> None:
    """Copy the whole records of a segment that is being written, or was torn by a crash."""
    end = 0
    try:
        for record in Segments(source).records(number):
            end = record.end
    except CorruptRecord:  # the record that is being written at this moment, or what a crash tore
        pass
    name = f"{number:08d}.segment"
    try:
        with (source / name).open("rb") as reading, (target / name).open("wb") as writing:
            while left := end - writing.tell():
                writing.write(reading.read(min(left, COPY_BYTES)))
    except FileNotFoundError:
        return


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StateFolderError(f"{folder} is there already; name a folder that is not")


def _finish(partial: Path, to: Path) -> None:
    sync_tree(partial)
    if to.exists():
        to.rmdir()
    partial.rename(to)
    sync(to.parent)
