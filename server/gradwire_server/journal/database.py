"""A SQLite database with one writer thread and group commit.

Writes that arrive while a commit is being fsynced go into the next one, so many concurrent writes cost one fsync, and
the event loop never waits for the disk. Writes are executed in the order in which they were requested, each in its own
savepoint, so that one that fails does not affect the others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.durable_files import is_full
from gradwire_server.errors import ServiceError
from gradwire_server.journal.mirror import MirroredConnection, copy_database
from gradwire_server.journal.schema import connect, connect_as, migrate, newest_commit

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_GROUP = 512
RAN_EVERY_S = 10.0
"""How much of the time for which servers ran a crash may lose."""
FULL_SAID_EVERY_S = 60.0
"""The log says that often that the disk is full, as long as it is."""


@dataclass(frozen=True)
class _Item:
    work: Work[Any]
    done: asyncio.Future[Any]


class Database:
    """The database. Create it on a running event loop.

    Args:
        path: The database file.
        before_commit: Called in the writer thread before each commit; an ``OSError`` from it fails the whole group.
        on_failed_group: Called in the writer thread when a whole group has failed.
        mirror: A second database file in which every change is made as well, until that fails.

    Attributes:
        commit: Number of the present commit; set in the writer thread before each group.
        noted: Whether a row that the present group changed has that number; set in the writer thread by who did that.
        on_commit: Called in the writer thread after each group with the number of writes, the duration in seconds, and
            whether the group was committed.
    """

    def __init__(
        self,
        path: Path,
        before_commit: Callable[[], object],
        on_failed_group: Callable[[], object],
        mirror: Path | None = None,
    ) -> None:
        self._mirror = mirror
        self._path, self._before_commit, self._on_failed_group = path, before_commit, on_failed_group
        self.on_commit: Callable[[int, float, bool], object] = lambda writes, seconds, committed: None
        self._began, self.noted = time.monotonic(), False
        self._full_said_s = -FULL_SAID_EVERY_S
        self._loop = asyncio.get_running_loop()
        connection = connect(self._path)
        migrate(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        [(self._ran_before_s,)] = connection.execute("SELECT ran_s FROM state").fetchall()
        self._noted_s = float(self._ran_before_s)
        self.commit = newest_commit(connection)
        connection.close()
        if mirror is not None and not mirror.exists():
            copy_database(path, mirror)
        self._asked: list[_Item] = []
        self._handing_over = False
        self._queue: queue.SimpleQueue[list[_Item] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="gradwire-journal", daemon=True)
        self._writer.start()
        self._reader = ThreadPoolExecutor(1, "gradwire-journal-reader")
        self._reading: sqlite3.Connection | None = None

    def write(self, work: Work[T], *, within_s: float = 0.0) -> asyncio.Future[T]:
        """Run ``work`` in the writer thread; the future resolves once its changes are durable, or fails.

        Args:
            within_s: Seconds for which it may wait for another write to commit with.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        self._asked.append(_Item(work, done))
        if within_s:
            self._loop.call_later(within_s, self._hand_over_if, done)
        elif not self._handing_over:
            # Hand over after the loop's other callbacks, or the writer competes with them for the GIL.
            self._handing_over = True
            self._loop.call_soon(self._hand_over)
        return done

    def _hand_over_if(self, done: asyncio.Future[Any]) -> None:
        if any(item.done is done for item in self._asked):
            self._hand_over()

    def _hand_over(self) -> None:
        self._handing_over = False
        asked, self._asked = self._asked, []
        if asked:
            self._queue.put(asked)

    def ran_s(self) -> float:
        """Seconds for which servers have run on this database, this one included."""
        return float(self._ran_before_s) + time.monotonic() - self._began

    async def read(self, query: Work[T]) -> T:
        """Run a query in the reader thread; it sees the state that was committed when it started."""

        def run() -> T:
            if self._reading is None:
                self._reading = connect(self._path)
            return query(self._reading)

        return await self._loop.run_in_executor(self._reader, run)

    def read_apart(self, query: Work[T]) -> T:
        """Run a query that takes long in the calling thread; it sees the state that was committed when it started."""
        with closing(connect(self._path)) as connection:
            return query(connection)

    async def close(self) -> None:
        """Finish the requested writes, then stop the threads."""
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        if self._reading is not None:
            await self.read(lambda connection: connection.close())
        self._reader.shutdown()

    def _write(self) -> None:
        connection = connect_as(MirroredConnection, self._path)
        if self._mirror is not None:
            connection.mirror, connection.mirror_folder = connect(self._mirror), self._mirror.parent
        ending = False
        while not ending:
            items: list[_Item] = []
            while not items or (len(items) < MAX_GROUP and not self._queue.empty()):
                asked = self._queue.get()
                if asked is None:
                    ending = True
                    break
                items += asked
            if items:
                outcomes = self._commit(connection, items)
                self._loop.call_soon_threadsafe(_deliver, items, outcomes)
        if connection.mirror is not None:
            connection.mirror.close()
        connection.close()

    def _commit(self, connection: sqlite3.Connection, items: list[_Item]) -> list[Any]:
        outcomes: list[Any] = []
        began = time.perf_counter()
        try:
            connection.execute("BEGIN IMMEDIATE")
            self.commit, self.noted, ran_s = self.commit + 1, False, self.ran_s()
            for item in items:
                connection.execute("SAVEPOINT item")
                try:
                    outcomes.append((item.work(connection), None))
                except Exception as error:  # passed on to the caller through the future
                    connection.execute("ROLLBACK TO item")
                    outcomes.append((None, self._storage_error(error)))
                connection.execute("RELEASE item")
            if not self.noted or ran_s >= self._noted_s + RAN_EVERY_S:
                connection.execute("UPDATE state SET commits = ?, ran_s = ?", (self.commit, ran_s))
                self._noted_s = ran_s
            self._before_commit()
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self.commit -= 1
            connection.rollback()
            self._on_failed_group()
            self.on_commit(len(items), time.perf_counter() - began, False)
            return [(None, self._storage_error(error))] * len(items)
        self.on_commit(len(items), time.perf_counter() - began, True)
        return outcomes

    def _storage_error(self, error: Exception) -> Exception:
        """The error that callers get; a full disk is the operator's to mend, so the log has it as well."""
        if not (isinstance(error, OSError) and is_full(error)) and not (
            isinstance(error, sqlite3.OperationalError) and "full" in str(error)
        ):
            return error
        if self.ran_s() >= self._full_said_s + FULL_SAID_EVERY_S:
            self._full_said_s = self.ran_s()
            log.error("the disk of %s is full: new operations are refused until there is room", self._path.parent)
        return ServiceError(
            pb.ERROR_CODE_STORAGE_FULL,
            "the server's disk is full: nothing was written; make room in its --state-dir and try again",
        )


def _deliver(items: list[_Item], outcomes: list[Any]) -> None:
    for item, (value, error) in zip(items, outcomes, strict=True):
        if item.done.cancelled():
            continue
        if error is None:
            item.done.set_result(value)
        else:
            item.done.set_exception(error)
