"""The state folder as a whole: its lock, and the checks that its parts belong together."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gradwire_server.durable_files import is_full
from gradwire_server.errors import NotNow
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.run_files import described_runs
from gradwire_server.journal.schema import NewerDatabase, check_version, connect, newest_commit, version_of
from gradwire_server.journal.segments import Segments

DATABASE = "gradwire.db"
SEGMENTS = "journal"
RUNS = "runs"


class StateFolderError(Exception):
    """A state folder cannot be used; the message says why and what to do."""


class FolderInUse(StateFolderError):
    """Another process holds the folder now."""


DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
FULL_BYTES = 1 << 20
"""A disk with less room counts as full: SQLite reports other errors then, too."""


def unusable(error: Exception, state_dir: Path) -> SystemExit:
    """The message to an operator whose server met an error of the disk, the database or its files at its start.

    Only a damaged database is to be replaced: where the disk is full, or another program holds the file, nothing is
    wrong with it.
    """
    database = state_dir / DATABASE
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in DAMAGED or isinstance(error, UnicodeDecodeError):  # sqlite3 can fail to decode its own message
        return SystemExit(
            f"gradwire: {database} is damaged ({error}); put its newest copy back (`gradwire restore`), or build it"
            f" again from what the folder holds: gradwire repair --state-dir {state_dir}"
        )
    if code in LOCKED:
        return NotNow(
            f"gradwire: {database} is locked by another program, such as a shell of sqlite3 or a copy that is"
            " being made: end it, and start again; nothing is wrong with the database"
        )
    if code == sqlite3.SQLITE_FULL or is_full(error) or _room(state_dir) < FULL_BYTES:
        return NotNow(
            f"gradwire: the disk of {state_dir} is full ({error}): make room, and start again; nothing is wrong with"
            " the database"
        )
    if code in READ_ONLY or getattr(error, "errno", 0) in (errno.EROFS, errno.EACCES, errno.EPERM):
        return NotNow(
            f"gradwire: {state_dir} cannot be written to ({error}): mount its disk for writing, or give its files to"
            " the server's user, and start again; nothing is wrong with the database"
        )
    return NotNow(
        f"gradwire: {state_dir} cannot be read or written ({error}): look at its disk (`dmesg`), and start again"
    )


def _room(folder: Path) -> int:
    """Bytes that are free on a folder's disk; many if that is not known."""
    try:
        found = os.statvfs(next(each for each in (folder, *folder.absolute().parents) if each.exists()))
    except OSError:
        return FULL_BYTES
    return found.f_bavail * found.f_frsize


class FolderLock:
    """The lock by which one process alone uses a state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir, self._descriptors = state_dir, list[int]()

    def take(self) -> None:
        """Lock the folder for this process.

        Raises:
            FolderInUse: Another process holds it.
            OSError: The disk has no room, or cannot be written to.
        """
        descriptor = os.open(self._state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            number = os.pread(descriptor, 20, 0).decode()
            self.release()
            holder = f"process {number}" if number else "another process"
            raise FolderInUse(f"the state folder {self._state_dir} is in use by {holder}") from None
        except OSError:  # the disk is full
            self.release()
            raise

    def release(self) -> None:
        """Unlock the folder; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state folder.

    Raises:
        StateFolderError: As for :meth:`FolderLock.take`.
    """
    lock = FolderLock(state_dir)
    lock.take()
    try:
        yield
    finally:
        lock.release()


def check(state_dir: Path) -> None:
    """Check that a state folder's database is there, and make it as new as what lies beside it.

    A server that started on an empty or an old database would delete segments that no row refers to.

    Raises:
        StateFolderError: It is not.
        sqlite3.DatabaseError: The database cannot be read.
    """
    database, segments = state_dir / DATABASE, Segments(state_dir / SEGMENTS)
    remedy = (
        f"put its newest copy back (`gradwire restore`), or build it again from what the folder holds:"
        f" gradwire repair --state-dir {state_dir}"
    )
    if not database.exists():
        number = len(segments.numbers())
        runs = sum(1 for folder in (state_dir / RUNS).glob("*") if any(folder.iterdir()))
        if number or runs:
            raise StateFolderError(
                f"{database} is missing, beside {number} segments of a journal and the folders of {runs} runs. Nothing"
                f" was changed; {remedy}"
            )
        return
    newest = bring_up_to_date(database, segments)
    with closing(connect(database)) as connection:
        try:
            check_version(connection)
        except NewerDatabase as error:
            raise StateFolderError(
                f"{database} cannot be used: {error}. Install that gradwire, or restore a backup from before"
            ) from error
        if version_of(connection) < 2:  # nothing beside it tells of its age
            return
        commits = newest_commit(connection)
        known = {run_id for (run_id,) in connection.execute("SELECT run_id FROM runs")}
    if newest > commits + 1:  # the last one may have been torn by a crash
        raise StateFolderError(
            f"{database} is an older copy: it ends at commit {commits}, the journal beside it at {newest}. Nothing was"
            f" changed; {remedy}"
        )
    if unknown := described_runs(state_dir / RUNS) - known:
        raise StateFolderError(
            f"{database} is an older copy, or another server's: it does not know {sorted(unknown)[0]}, whose folder is"
            f" in {state_dir / RUNS}. Nothing was changed; {remedy}"
        )
