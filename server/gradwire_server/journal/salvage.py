"""What only a database holds, read from one that is damaged or outdated before it is replaced (:mod:`.repair`)."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.history import parse_waiting
from gradwire_server.journal.schema import connect
from gradwire_server.journal.segments import Segments
from gradwire_server.journal.state_folder import DATABASE, SEGMENTS

JOB_TABLES = ("jobs", "job_events", "files")
Facts = tuple[int, float, str, str]
"""A row of what a run was computed with: from which operation on, since when, the facts as JSON, what changed."""


@dataclass
class Salvaged:
    """What a database holds of a run that neither segments nor the run's folder hold.

    Attributes:
        facts: What the run was computed with, oldest first.
        points: What its operations measured, in order; points that were damaged are left out.
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
    """Read the rows of jobs, their events and files that can be read, by table; only the database has them."""
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
