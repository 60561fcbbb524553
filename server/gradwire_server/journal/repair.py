"""Building the database again from what the state folder holds beside it.

The segments have every operation that a recovery needs and every result that waits to be fetched; the runs' folders
have their descriptions and checkpoints. The rebuilt database leads to the same runs in the same state. Results that had
been fetched are gone, as they were before. What runs were computed with, and what was measured before the results that
are found, is taken from the database that is replaced, as far as it can be read (:func:`salvage`). So are
jobs, files and rollout sessions.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from gradwire_proto.v1 import engine_pb2, journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import MANIFEST, NAME, ORIGIN, DamagedCheckpoint, Manifest, read_manifest
from gradwire_server.durable_files import sync
from gradwire_server.journal import history
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.history import parse_waiting
from gradwire_server.journal.retention import delete_trimmed
from gradwire_server.journal.rows import rows_of
from gradwire_server.journal.run_files import read_description, write_description
from gradwire_server.journal.schema import OPERATION, connect, migrate
from gradwire_server.journal.segments import CorruptRecord, Record, Segments
from gradwire_server.journal.state_folder import DATABASE, RUNS, SEGMENTS, StateFolderError, locked
from gradwire_server.operation_kinds import kind_of
from gradwire_server.stores.claim import stored
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import CHECKPOINTS, Store, run_owner, saved_place

EPOCHS = 1 << 20
"""How far the epoch of a rebuilt run is ahead of the newest one that is known: above any that was given out since."""


@dataclass(frozen=True)
class _Found:
    """A record, and where it is."""

    record: journal_pb2.JournalRecord
    place: Record


@dataclass
class _Log:
    """Records found in the segments, by run and number.

    Attributes:
        operations: The newest record of each: a number that was refused may have been used again.
        results: The first record of each: a result that is stored is not replaced.
        commits: The newest commit.
        cut: Faults of segments that could not be read to their end.
        old: Number of records of version 1, which do not say what they are.
    """

    operations: dict[str, dict[int, _Found]] = field(default_factory=dict)
    results: dict[str, dict[int, _Found]] = field(default_factory=dict)
    commits: int = 0
    cut: list[str] = field(default_factory=list)
    old: int = 0


@dataclass(frozen=True)
class RepairedRun:
    """Summary of a run that was entered.

    Attributes:
        owner: Name of the key that owns it.
        accepted_seq: Its last operation.
        num_waiting: Operations that are carried out at the next start.
        complete: Whether every operation after the checkpoint from which it goes on was found.
    """

    run_id: str
    owner: str
    checkpoints: int
    accepted_seq: int
    num_waiting: int
    complete: bool


def repair(state_dir: Path, owner: str, say: Callable[[str], object], *, tidy: bool = False) -> list[RepairedRun]:
    """Build the database again; the one that is there is kept beside it under another name.

    Args:
        state_dir: The state folder of a server that does not run.
        owner: Name of the key that gets the runs whose folders do not say whose they are.
        say: Called with a sentence for each thing that could not be used.
        tidy: Whether to delete from the store of the checkpoints what no run or upload refers to.

    Raises:
        StoreError: The store of the checkpoints cannot be used.
        StateFolderError: A server runs on the folder, or there is nothing of one in it.
    """
    if not any((state_dir / name).exists() for name in (DATABASE, RUNS, SEGMENTS)):
        raise StateFolderError(
            f"{state_dir} is not the state folder of a server: it has no {DATABASE}, {RUNS} or {SEGMENTS}"
        )
    with locked(state_dir):
        elsewhere = stored(state_dir)
        store = elsewhere or FolderStore(state_dir)
        log = _read_log(Segments(state_dir / SEGMENTS))
        for sentence in log.cut:
            say(sentence)
        if log.old:
            say(
                f"{log.old} records of version 1 hold batches without their operations; the runs that they belong to go"
                " on from their newest checkpoints"
            )
        salvaged = salvage(state_dir)
        new = state_dir / f"{DATABASE}.new"
        _remove(new)
        repaired = []
        try:
            with closing(connect(new)) as connection:
                migrate(connection)
                connection.execute("BEGIN IMMEDIATE")
                for folder in sorted((state_dir / RUNS).glob("*")):
                    description = _description(store, folder, owner, say)
                    if description is not None:
                        kept = salvaged.get(description.run_id, Salvaged())
                        repaired.append(_enter(connection, store, description, log, kept, say))
                for table, rows in salvage_jobs(state_dir).items():
                    for row in rows:
                        connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
                connection.execute("UPDATE state SET commits = ?", (log.commits + 1,))
                connection.execute("COMMIT")
        except BaseException:
            _remove(new)
            raise
        _put_aside(state_dir / DATABASE, say)
        new.rename(state_dir / DATABASE)
        sync(state_dir)
        if elsewhere is not None:
            uploads = {f"uploads/{folder.name}" for folder in (state_dir / "uploads").glob("*")}
            runs = {run_owner(folder.name) for folder in (state_dir / RUNS).glob("*")}
            elsewhere.inspect(runs | uploads, say, tidy=tidy)
    return repaired


def _read_log(segments: Segments) -> _Log:
    log = _Log()
    for number in segments.numbers():
        try:
            for place in segments.records(number):
                log.commits = max(log.commits, place.commit)
                if not place.description:
                    log.old += 1
                    continue
                record = journal_pb2.JournalRecord.FromString(place.description)
                if record.statements:
                    continue  # what they change is made of the other records
                entry = _Found(record, place)
                if record.HasField("result"):
                    log.results.setdefault(record.run_id, {}).setdefault(record.seq, entry)
                else:
                    log.operations.setdefault(record.run_id, {})[record.seq] = entry
                    # A number is used again only if the transaction with its first operation was not committed; a
                    # result that was written with it was not, either.
                    log.results.get(record.run_id, {}).pop(record.seq, None)
        except CorruptRecord as error:
            log.cut.append(f"segment {number:08d} was read up to a record that is torn or damaged: {error}")
    return log


def _description(
    store: Store, folder: Path, owner: str, say: Callable[[str], object]
) -> journal_pb2.RunDescription | None:
    """The description of a run, from its file or else from its checkpoints."""
    if not NAME.fullmatch(folder.name) or not folder.is_dir():
        return None
    description = read_description(folder)
    if description is not None:
        return description
    manifests = _manifests(store, folder.name, lambda sentence: None)
    if not manifests:
        say(f"{folder.name}: its folder has neither a description nor a checkpoint; it is left as it is")
        return None
    newest = max(manifests, key=lambda manifest: manifest.seq)
    origin = engine_pb2.EngineCreateRun(run_id=folder.name, config=newest.config)
    description = journal_pb2.RunDescription(
        run_id=folder.name, owner=owner, config=newest.config, created_at=newest.created_at, origin=origin
    )
    say(f"{folder.name}: its folder does not say whose it is; it belongs to {owner!r} now (--owner)")
    write_description(folder, description)
    return description


def _manifests(store: Store, run_id: str, say: Callable[[str], object]) -> list[Manifest]:
    """The checkpoints of a run whose files are as they were saved."""
    manifests = []
    for name in store.names(run_owner(run_id), CHECKPOINTS):
        if name == ORIGIN or not NAME.fullmatch(name):
            continue
        place = saved_place(run_id, CHECKPOINTS, name)
        try:
            with store.reading(place, MANIFEST) as folder:
                manifest = read_manifest(folder)
            for file, saved in manifest.files.items():
                store.check(place, file, saved)
            manifests.append(manifest)
        except DamagedCheckpoint as error:
            say(f"{run_id}/{name}: left out, because it is damaged: {error}")
    return manifests


def _enter(
    connection: sqlite3.Connection,
    store: Store,
    about: journal_pb2.RunDescription,
    log: _Log,
    salvaged: Salvaged,
    say: Callable[[str], object],
) -> RepairedRun:
    """Enter a run with its checkpoints, operations and results, and what the old database still held."""
    run_id = about.run_id
    manifests = sorted(_manifests(store, run_id, say), key=lambda manifest: manifest.seq)
    operations, results = log.operations.get(run_id, {}), log.results.get(run_id, {})
    operations = operations | {
        seq: entry for seq, entry in results.items() if seq not in operations and entry.record.HasField("operation")
    }
    complete_states = [manifest for manifest in manifests if not manifest.weights_only]
    base, newest, last = _reach(complete_states, operations, results, bool(log.cut))
    kept = {seq: entry for seq, entry in results.items() if seq <= last}
    decided = [seq for seq, entry in kept.items() if entry.record.result.status != pb.STATUS_CANCELLED]
    carried_out = max([newest, *decided])
    waiting = [seq for seq in range(carried_out + 1, last + 1) if seq not in kept]
    released = min([*kept, *waiting], default=last + 1) - 1
    points = {(each.run_id, each.seq): each for each in salvaged.points if each.run_id != run_id or each.seq <= last}
    for seq in range(min(base, released) + 1, last + 1):
        operation = _enter_operation(connection, run_id, seq, operations.get(seq))
        if seq in kept:
            point = _enter_result(connection, kept[seq], operation)
            if point is not None and seq in operations:
                points.setdefault((run_id, seq), point)
        elif seq <= carried_out:
            connection.execute(
                f"UPDATE operations SET status = ?, digest = {OPERATION.replace('status', '?')}"
                " WHERE run_id = ? AND seq = ?",
                (pb.STATUS_SUCCEEDED, pb.STATUS_SUCCEEDED, run_id, seq),
            )
    _enter_salvaged(connection, run_id, last, list(points.values()), salvaged, say)
    for manifest in manifests:
        saved = manifest.to_proto()
        saved.path, saved.name = f"{run_id}/{manifest.name}", manifest.name
        connection.execute(
            "INSERT INTO checkpoints VALUES (?, ?, ?)", (run_id, manifest.name, saved.SerializeToString())
        )
    for reader in about.readers:
        connection.execute("INSERT INTO readers VALUES (?, ?)", (run_id, reader))
    epoch = max([entry.record.operation.epoch for entry in operations.values()], default=0)
    marks = kept[max(decided)].record if decided and max(decided) >= newest else None
    step = complete_states[-1].step if complete_states else _origin_step(store, about)
    if marks is not None:
        step = marks.step
    values = {
        "run_id": run_id, "owner": about.owner, "config": about.config.SerializeToString(),
        "created_at": about.created_at, "idempotency_key": about.idempotency_key, "request": about.request,
        "ready": 1, "epoch": epoch + EPOCHS, "accepted_seq": last,
        "applied_seq": min(waiting, default=last + 1) - 1, "released_seq": released, "trimmed_seq": base, "step": step,
        "failure_seq": marks.failure_seq if marks is not None else 0,
        "failure": marks.failure if marks is not None else "",
        "num_trainable_parameters": about.num_trainable_parameters, "forked_from": about.forked_from,
        "origin": about.origin.SerializeToString(),
    }  # fmt: skip
    names = ", ".join(values)
    connection.execute(f"INSERT INTO runs ({names}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))
    delete_trimmed(connection, run_id, base)
    found_to = max([*operations, *results, newest], default=0)
    complete = found_to == last and not (log.old and not operations)
    if found_to > last:
        say(f"{run_id}: operations {last + 1} to {found_to} were left out, because one before them could not be read")
    return RepairedRun(run_id, about.owner, len(manifests), last, len(waiting), complete)


def _enter_salvaged(
    connection: sqlite3.Connection,
    run_id: str,
    last: int,
    points: list[pb.HistoryPoint],
    salvaged: Salvaged,
    say: Callable[[str], object],
) -> None:
    """Enter what a run measured and what it was computed with; say what of that is lost."""
    points = sorted(points, key=lambda point: (point.run_id == run_id, point.seq if point.run_id == run_id else 0))
    history.add(connection, run_id, points, None)  # the server knows how many it keeps
    for seq, at, facts, note in salvaged.facts:
        if seq <= last:
            query = "INSERT INTO computed_with (run_id, seq, at, facts, note) VALUES (?, ?, ?, ?, ?)"
            connection.execute(query, (run_id, seq, at, facts, note))
    first = min((point.seq for point in points if point.run_id == run_id), default=last + 1)
    if not salvaged.points and first > 1:
        say(f"{run_id}: what was measured up to operation {first - 1} was in the old database only, and is lost")
    if not salvaged.facts:
        say(
            f"{run_id}: what it was computed with was in the old database only, and is lost: its next restore cannot"
            " compare base model, versions and settings, so make sure that they are those of before"
        )


def _reach(
    manifests: list[Manifest], operations: dict[int, _Found], results: dict[int, _Found], damaged: bool
) -> tuple[int, int, int]:
    """Where a recovery may start, and how far the operations reach.

    An operation between others that no segment holds was a read whose result had been stored: the segments of all
    others are kept. With damaged segments that cannot be told, and nothing behind such a gap is used.

    Returns:
        The oldest state (0 for the origin) behind which every operation is there, the newest checkpoint, and the last
        operation.
    """
    newest = manifests[-1].seq if manifests else 0
    last = max([*operations, *results, newest], default=0)
    if damaged:
        last = next((seq - 1 for seq in range(newest + 1, last + 1) if seq not in operations), last)
    for base in sorted({0, *(manifest.seq for manifest in manifests)}):
        if all(seq in operations for seq in range(base + 1, last + 1)):
            return base, newest, last
    return newest, newest, last


def _enter_operation(connection: sqlite3.Connection, run_id: str, seq: int, entry: _Found | None) -> pb.Operation:
    """Enter an operation without a result; one of which no record is left was a read."""
    if entry is not None and not entry.record.HasField("result"):
        _enter_rows(connection, entry.record, entry.place)
        return entry.record.operation.operation
    read = pb.OperationHeader(run_id=run_id, seq=seq, operation=pb.Operation(forward=pb.LossCall()))
    header, at = (read, time.time()) if entry is None else (entry.record.operation, entry.record.at)
    _enter_rows(connection, journal_pb2.JournalRecord(run_id=run_id, seq=seq, at=at, operation=header), None)
    return header.operation


def _enter_result(connection: sqlite3.Connection, found: _Found, operation: pb.Operation) -> pb.HistoryPoint | None:
    """Enter a result, which is kept from now on for as long as a new one; return what the operation measured."""
    record = journal_pb2.JournalRecord()
    record.CopyFrom(found.record)
    for name in ("stored_s", "saved", "point"):  # checkpoints are entered from their folders, points into the record
        record.ClearField(name)
    replayed = kind_of(operation).changes_state and record.result.status == pb.STATUS_SUCCEEDED
    if record.kept == journal_pb2.KEPT_UNSPECIFIED and replayed:
        record.kept = journal_pb2.KEPT_REPLAYED
    _enter_rows(connection, record, found.place)
    if found.record.HasField("point"):
        return found.record.point
    point = history.history_point(record.run_id, operation, record.result, record.step)
    if point is not None:
        point.time = record.at
    return point


def _enter_rows(connection: sqlite3.Connection, record: journal_pb2.JournalRecord, place: Record | None) -> None:
    location, payload_bytes = (None, 0) if place is None else (place.location, place.payload_bytes)
    for sql, values in rows_of(record, location, payload_bytes, 0):
        connection.execute(sql, values)


def _origin_step(store: Store, about: journal_pb2.RunDescription) -> int:
    """Optimizer steps of the state in which a run was created."""
    if not about.origin.checkpoint or about.origin.weights_only:
        return 0
    try:
        with store.reading(saved_place(about.run_id, CHECKPOINTS, ORIGIN), MANIFEST) as folder:
            return read_manifest(folder).step
    except (DamagedCheckpoint, FileNotFoundError):
        return 0


def _put_aside(database: Path, say: Callable[[str], object]) -> None:
    aside = database.with_name(f"{database.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("-wal", ""):  # the log first: a crash in between leaves a database that is known to be old
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    database.with_name(database.name + "-shm").unlink(missing_ok=True)
    if aside.exists():
        say(f"the database that was there is {aside.name} now; delete it when all is well")


def _remove(database: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


# ---- what only a database holds, read from one that is damaged or outdated before it is replaced ----

JOB_TABLES = ("jobs", "job_events", "files", "sessions", "session_turns")
Facts = tuple[int, float, str, str]
"""A row of what a run was computed with: from which operation on, since when, the facts as JSON, what changed."""


@dataclass
class Salvaged:
    """Rows of a run that neither segments nor the run's folder repeat.

    Attributes:
        facts: The facts that the run was computed with, oldest first.
        points: The points of its record, in order, without damaged ones.
    """

    facts: list[Facts] = field(default_factory=list)
    points: list[pb.HistoryPoint] = field(default_factory=list)


def salvage(state_dir: Path) -> dict[str, Salvaged]:
    """Read what can be read of a database, by run; it may be missing, damaged, or of an earlier version."""
    salvaged: dict[str, Salvaged] = {}
    with _copied(state_dir) as copy:
        for read in (_read_facts, _read_points, _read_waiting_points):
            # What was read up to an error is kept; what is missing is said of each run.
            with suppress(sqlite3.DatabaseError), closing(connect(copy)) as connection:
                read(connection, salvaged)
    return salvaged


def salvage_jobs(state_dir: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Read the rows of jobs, files and rollout sessions that can be read, by table; only the database has them."""
    rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in JOB_TABLES}
    with _copied(state_dir) as copy:
        for table in JOB_TABLES:
            with suppress(sqlite3.DatabaseError), closing(connect(copy)) as connection:
                if _has(connection, table):
                    for row in connection.execute(f"SELECT * FROM {table}"):
                        rows[table].append(row)
    return rows


@contextmanager
def _copied(state_dir: Path) -> Iterator[Path]:
    """Provide a copy of a database to read, as opening one changes its files; an empty one if it is missing."""
    with tempfile.TemporaryDirectory(prefix="gradwire-repair-") as folder:
        for suffix in ("", "-wal"):
            part = state_dir / (DATABASE + suffix)
            if part.exists():
                shutil.copy(part, Path(folder) / part.name)
        copy = Path(folder) / DATABASE
        with suppress(sqlite3.DatabaseError):
            bring_up_to_date(copy, Segments(state_dir / SEGMENTS))
        yield copy


def _read_facts(connection: sqlite3.Connection, salvaged: dict[str, Salvaged]) -> None:
    if not _has(connection, "computed_with"):
        return
    query = "SELECT run_id, seq, at, facts, note FROM computed_with ORDER BY position"
    for run_id, seq, at, facts, note in connection.execute(query):
        try:
            readable = isinstance(json.loads(facts), dict)
        except (TypeError, ValueError):
            readable = False
        if readable and isinstance(seq, int) and isinstance(at, float):
            salvaged.setdefault(str(run_id), Salvaged()).facts.append((seq, at, facts, str(note)))


def _read_points(connection: sqlite3.Connection, salvaged: dict[str, Salvaged]) -> None:
    if not _has(connection, "history"):
        return
    whole = "digest = digest(made_by, seq, operation, number, point)"
    query = f"SELECT run_id, point, {whole} FROM history ORDER BY position"
    for run_id, point, is_whole in connection.execute(query):
        if not is_whole:
            continue
        try:
            salvaged.setdefault(str(run_id), Salvaged()).points.append(pb.HistoryPoint.FromString(point))
        except DecodeError:
            continue


def _read_waiting_points(connection: sqlite3.Connection, salvaged: dict[str, Salvaged]) -> None:
    """Read the points that had not been moved into a run's record yet; earlier versions have none."""
    for run_id, raw in connection.execute("SELECT run_id, point FROM results WHERE point IS NOT NULL ORDER BY seq"):
        point = parse_waiting(raw) if isinstance(raw, bytes) else None
        if point is not None:
            salvaged.setdefault(str(run_id), Salvaged()).points.append(point)


def _has(connection: sqlite3.Connection, table: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (table,)).fetchone() is not None
