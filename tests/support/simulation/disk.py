"""The journal's disk: commits take time, fail when the disk is full, and are torn when the power goes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gradwire_server.journal import database
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.segments import Segments

SECTOR = 512


class NoThread:
    """Stand-in for the journal's writer thread; the simulated disk does its work on the event loop."""

    def __init__(self, **options: object) -> None:
        self.start = self.join = lambda: None


THREADS = SimpleNamespace(Thread=NoThread)


class Disk:
    """One state folder through crashes of the machine.

    Args:
        folder: Parent of the state folders; each crash leaves the next server a copy.
        crash: Called when a commit's fate is that the machine dies in it.
    """

    def __init__(self, folder: Path, rng: random.Random, crash: Callable[[], None]) -> None:
        self._parent, self._rng, self._crash = folder, rng, crash
        self._count = 0
        self.state_dir = folder / "state-0"
        self.full = False
        self.commits = 0
        self.crash_in_commit = 0.0
        self._torn: dict[str, bytes] = {}
        self._synced: dict[str, int] = {}

    def fsync(self, descriptor: int) -> None:
        """Stand-in for ``os.fsync``: the present content of a file survives."""
        self._synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def close_files(self) -> None:
        """Close what killed servers held open, as the kernel does; a database's connections close themselves."""
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):  # of the list itself
                file = Path(os.readlink(link))
                if file.is_relative_to(self._parent) and (file.suffix == ".segment" or file.name == "lock"):
                    os.close(int(link.name))

    def commit(self, journal: SimulatedDatabase, connection: sqlite3.Connection, items: list[Any]) -> list[Any] | None:
        """Commit a group; return its outcomes, or None if the machine died meanwhile."""
        self.commits += 1
        if self._rng.random() >= self.crash_in_commit:
            return journal.commit_now(connection, items)
        fate = self._rng.choice(("before", "torn", "after"))
        log, main = self.state_dir / "gradwire.db-wal", self.state_dir / "gradwire.db"
        if fate == "before":
            self._tear_segment()
        else:
            before, untouched = (log.read_bytes() if log.exists() else b""), main.stat().st_mtime_ns
            synced = dict(self._synced)
            journal.commit_now(connection, items)
            if fate == "torn" and (not log.exists() or log.read_bytes() == before):
                self._synced = synced  # it died before the segment was synced
            elif fate == "torn" and main.stat().st_mtime_ns == untouched:  # else the log was synced before this
                self._torn[log.name] = self._mixed(before, log.read_bytes())
        self._crash()
        return None

    def lose_power(self) -> None:
        """Give the next server what the disk holds; files that the dead server holds open stay."""
        self._count += 1
        following = self._parent / f"state-{self._count}"
        shutil.copytree(self.state_dir, following, ignore=shutil.ignore_patterns("*-shm", "lock"))
        for name, content in self._torn.items():
            (following / name).write_bytes(content)
        self._torn.clear()
        for segment in (self.state_dir / "journal").glob("*.segment"):
            synced, size = self._synced.get(str(segment), 0), segment.stat().st_size
            os.truncate(following / "journal" / segment.name, self._rng.randint(min(synced, size), size))
            self._synced[str(following / "journal" / segment.name)] = synced
        self.state_dir = following

    def accepted(self) -> dict[str, int]:
        """The number of the last operation on the disk, by run."""
        return dict(self._read("SELECT run_id, accepted_seq FROM runs"))

    def trimmed(self, run_id: str) -> int:
        """The number up to which rows of operations may be missing."""
        return dict(self._read("SELECT run_id, trimmed_seq FROM runs"))[run_id]

    def _read(self, query: str) -> list[tuple[str, int]]:
        aside = self._parent / "aside"  # who closes a database changes it
        aside.mkdir(exist_ok=True)
        for name in ("gradwire.db", "gradwire.db-wal"):
            (aside / name).unlink(missing_ok=True)
            if (self.state_dir / name).exists():  # a server that was starting may have left no log
                shutil.copyfile(self.state_dir / name, aside / name)
        bring_up_to_date(aside / "gradwire.db", Segments(self.state_dir / "journal"))
        with closing(database.connect(aside / "gradwire.db")) as connection:
            return connection.execute(query).fetchall()

    def _mixed(self, before: bytes, after: bytes) -> bytes:
        """Return a file of which only some sectors were written."""
        length = self._rng.choice((len(before), len(after)))
        before, after = (content[:length].ljust(length, b"\0") for content in (before, after))
        mixed = bytearray(before)
        for start in range(0, length, SECTOR):
            if before[start : start + SECTOR] != after[start : start + SECTOR] and self._rng.random() < 0.5:
                mixed[start : start + SECTOR] = after[start : start + SECTOR]
        return bytes(mixed)

    def _tear_segment(self) -> None:
        segments = sorted((self.state_dir / "journal").glob("*.segment"))
        if segments:
            with segments[-1].open("ab") as file:
                file.write(self._rng.randbytes(self._rng.randrange(40)))


class SimulatedDatabase(database.Database):
    """The real database with its real SQL, whose writer is timers instead of a thread."""

    disk: Disk
    rng: random.Random

    async def open(self) -> None:
        await super().open()
        self._connection = database.connect_as(database.JournalConnection, self._path)
        self._waiting: list[Any] = []
        self._busy = False
        synced = self._segments.sync

        def sync() -> None:
            if self.disk.full:
                raise OSError(errno.ENOSPC, "the simulated disk is full")
            synced()

        self._segments.sync = sync  # type: ignore[method-assign]

    def _hand_over(self) -> None:
        self._handing_over = False
        asked, self._asked = self._asked, []
        self._waiting += asked
        self._begin()

    def _begin(self) -> None:
        if self._waiting and not self._busy:
            self._busy = True
            self._loop.call_later(self.rng.expovariate(1 / 0.004), self._end)

    def _end(self) -> None:
        items, self._waiting = self._waiting[: database.MAX_GROUP], self._waiting[database.MAX_GROUP :]
        outcomes = self.disk.commit(self, self._connection, items)
        if outcomes is not None:
            self._loop.call_later(self.rng.uniform(0, 0.001), self._delivered, items, outcomes)

    def _delivered(self, items: list[Any], outcomes: list[Any]) -> None:
        self._busy = False
        database._deliver(items, outcomes)
        self._begin()

    def commit_now(self, connection: sqlite3.Connection, items: list[Any]) -> list[Any]:
        """Do the work of the writer thread."""
        outcomes = self._commit(connection, items)
        if not self.disk.full and self.rng.random() < 0.2:
            self._put_into_file(self._connection)
        return outcomes
