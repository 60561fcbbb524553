"""The state folder as a whole: its lock, and the checks that its parts belong together."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.run_files import described_runs
from gradwire_server.journal.schema import NewerDatabase, check_version, connect, newest_commit, version_of
from gradwire_server.journal.segments import Segments

DATABASE = "gradwire.db"
SEGMENTS = "journal"
RUNS = "runs"


class StateFolderError(Exception):
    """A state folder cannot be used; the message says why and what to do."""


def lock(state_dir: Path) -> int:
    """Lock a state folder for this process; returns the descriptor whose closing unlocks it.

    Raises:
        StateFolderError: Another process holds it.
    """
    descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        number = os.pread(descriptor, 20, 0).decode()
        holder = f"process {number}" if number else "another process"
        os.close(descriptor)
        raise StateFolderError(f"the state folder {state_dir} is in use by {holder}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state folder.

    Raises:
        StateFolderError: As for :func:`lock`.
    """
    descriptor = lock(state_dir)
    try:
        yield
    finally:
        os.close(descriptor)


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
