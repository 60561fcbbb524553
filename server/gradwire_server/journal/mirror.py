"""The journal's second copy: a folder, best on another disk, in which every commit is written as well.

Either copy is enough. At the start the two are compared, byte by byte, and the better one replaces the other; a record
that is damaged in one afterwards is read from the other. When the mirror fails while the server runs, the server goes
on with one copy and says so.
"""

from __future__ import annotations

import filecmp
import logging
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire_server.durable_files import make_folder, replacing_file, sync_tree
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.schema import (
    OPERATION,
    RESULT,
    RUN,
    VERSION,
    connect,
    migrate,
    newest_commit,
    version_of,
)
from gradwire_server.journal.segments import CorruptRecord, Segments
from gradwire_server.journal.state_folder import DATABASE, SEGMENTS, StateFolderError

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class _Health:
    """How good a copy of the database is; the greater, the better.

    Attributes:
        readable: Whether SQLite finds it whole.
        commits: Its newest commit.
        intact: Minus the number of rows that are not what was written.
        folder: Name of the state folder that it belongs to.
    """

    readable: bool
    commits: int
    intact: int
    folder: str


def reconcile(state_dir: Path, mirror: Path) -> None:
    """Make the two copies of a journal equal; run it before a server uses them.

    Raises:
        StateFolderError: The mirror is another state folder's.
    """
    make_folder(mirror / SEGMENTS, 0o700)
    make_folder(state_dir / SEGMENTS, 0o700)
    for folder in (state_dir, mirror):
        with suppress(sqlite3.DatabaseError):  # its health says so
            bring_up_to_date(folder / DATABASE, Segments(folder / SEGMENTS))
    ours, theirs = _health(state_dir / DATABASE), _health(mirror / DATABASE)
    if ours is None and theirs is None:
        return
    if ours is not None and theirs is not None and ours.readable and theirs.readable and ours.folder != theirs.folder:
        raise StateFolderError(
            f"{mirror} mirrors the journal of another state folder than {state_dir}: name an empty folder, or empty it"
        )
    mirror_better = theirs is not None and theirs.readable and (ours is None or theirs > ours)
    if mirror_better:
        log.error("the journal of %s is restored from its mirror %s", state_dir, mirror)
    if ours is not None and not ours.readable and not mirror_better:
        return  # the start says what is wrong with it
    better, worse = (mirror, state_dir) if mirror_better else (state_dir, mirror)
    if ours != theirs:
        copy_database(better / DATABASE, worse / DATABASE)
    _reconcile_segments(better / SEGMENTS, worse / SEGMENTS)


def _health(database: Path) -> _Health | None:
    """None if there is no database."""
    if not database.exists():
        return None
    try:
        with closing(connect(database)) as connection:
            if version_of(connection) < VERSION:
                migrate(connection)
            [(verdict,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
            [(folder,)] = connection.execute("SELECT folder FROM state").fetchall()
            damaged = 0
            for table, digest in (("runs", RUN), ("operations", OPERATION), ("results", RESULT)):
                query = f"SELECT count(*) FROM {table} WHERE digest IS NOT {digest}"
                damaged += connection.execute(query).fetchone()[0]
            return _Health(verdict == "ok", newest_commit(connection), -damaged, folder)
    except (sqlite3.DatabaseError, UnicodeDecodeError, ValueError):  # sqlite3 can fail to decode its own message
        return _Health(False, 0, 0, "")


def copy_database(source: Path, target: Path) -> None:
    """Copy a database; one that is there is kept under another name."""
    if target.exists():
        aside = target.with_name(f"{target.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        for suffix in ("-wal", ""):
            part = target.with_name(target.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
    target.with_name(target.name + "-shm").unlink(missing_ok=True)
    with (
        replacing_file(target) as partial,
        closing(connect(source)) as reading,
        closing(connect(partial)) as writing,
    ):
        reading.backup(writing)
        writing.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _reconcile_segments(better: Path, worse: Path) -> None:
    """Copy every segment that only one side has, or that one side has more of."""
    numbers = {*Segments(better).numbers(), *Segments(worse).numbers()}
    for number in sorted(numbers):
        name = f"{number:08d}.segment"
        first, second = better / name, worse / name
        if first.exists() and second.exists() and filecmp.cmp(first, second, shallow=False):
            continue
        good, bad = (first, second) if _readable(better, number) >= _readable(worse, number) else (second, first)
        with replacing_file(bad) as partial:
            shutil.copy2(good, partial)
        log.warning("%s is copied from %s", bad, good)
    sync_tree(better)
    sync_tree(worse)


def _readable(folder: Path, number: int) -> int:
    """Bytes of the whole records at the beginning of a segment; -1 if it is missing."""
    end = -1
    try:
        for record in Segments(folder).records(number):
            end = record.end
    except CorruptRecord:
        return end
    return end
