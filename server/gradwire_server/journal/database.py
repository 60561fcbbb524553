"""A SQLite database with one writer thread and group commit.

Writes that arrive while a commit is being fsynced go into the next one, so many concurrent writes cost one fsync, and
the event loop never waits for the disk. Writes are executed in the order in which they were requested; what one
that fails has changed is taken back, and does not affect the others.

A commit is durable by its record in the segments (:mod:`.commit_log`). SQLite's own transaction goes over many of them:
its pages are written once for all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.durable_files import is_full
from gradwire_server.errors import ServiceError
from gradwire_server.journal.commit_log import TRANSACTIONS, Statement, description_of
from gradwire_server.journal.rows import Row
from gradwire_server.journal.schema import GIVE_BACK, connect, connect_as, migrate, newest_commit
from gradwire_server.journal.segments import Location, Segments

log = logging.getLogger(__name__)

T = TypeVar("T")
Query = Callable[[sqlite3.Connection], T]

MAX_GROUP = 512
RAN_EVERY_S = 10.0
"""A crash may lose this much of the recorded running time."""
OPEN_S = 1.0
OPEN_BYTES = 4 << 20
"""How long SQLite's transaction stays open, and how much it may change: what a start after a crash does again."""
FULL_SAID_EVERY_S = 60.0
"""The log says that often that the disk is full, as long as it is."""


class JournalConnection(sqlite3.Connection):
    """A connection whose changes are noted, to be made again after a crash.

    The statements of the journal depend on nothing but their values and the tables: made again, they do the same.

    Attributes:
        statements: The changes since whoever uses the connection emptied this list.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.statements: list[Statement] = []
        self._record: Location | None = None

    def enter(self, rows: Iterable[Row], record: Location | None) -> sqlite3.Cursor:
        """Make the changes of a record, of which the commit then names only where it is; None if it is nowhere.

        Returns:
            The cursor of the last change.
        """
        self._record = record
        try:
            for sql, values in rows:
                cursor = self.execute(sql, values)
        finally:
            self._record = None
        return cursor

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement and, unless it only reads, note it."""
        cursor = super().execute(sql, parameters)
        if sql.startswith(("SELECT", "PRAGMA")) and not sql.startswith(GIVE_BACK):
            return cursor
        if not sql.startswith(TRANSACTIONS):
            self.statements.append(Statement(sql, parameters, self._record))
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute a statement with each of the parameters, and note each."""
        for each in parameters:
            self.execute(sql, each)
        return self.cursor()


class _Item(NamedTuple):
    work: Callable[[JournalConnection], Any]
    done: asyncio.Future[Any]
    into_file: bool = False
    """Whether SQLite's transaction ends with it."""
    due_s: float = 0.0
    """Until when it may wait for others, by the loop's clock."""


class Database:
    """The database, between :meth:`open` and :meth:`close`.

    Args:
        path: The database file, up to date with the segments.
        segments: Where commits are recorded, after the records that their writes have added; used in the writer thread.

    Attributes:
        commit: Number of the present commit; set in the writer thread before each group.
        noted: Whether a row that the present group changed has that number; set in the writer thread by who did that.
        on_commit: Called in the writer thread after each group with the number of writes, the duration in seconds, and
            whether the group was committed.
    """

    def __init__(self, path: Path, segments: Segments) -> None:
        self._path, self._segments = path, segments
        self.on_commit: Callable[[int, float, bool], object] = lambda writes, seconds, committed: None
        self._began, self.noted = time.monotonic(), False
        self._open, self._open_bytes, self._open_until_s = list[Statement](), 0, math.inf
        self._full_said_s = -FULL_SAID_EVERY_S
        self._loop = asyncio.get_running_loop()
        self._ran_before_s = self._noted_s = 0.0
        self.commit = 0
        self._asked: list[_Item] = []
        self._handing_over = False
        self._due: asyncio.Handle | None = None
        self._due_s = 0.0
        self._queue: queue.SimpleQueue[list[_Item] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="gradwire-journal", daemon=True)
        self._reader = ThreadPoolExecutor(1, "gradwire-journal-reader")
        self._reading: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Create the file or bring it to the present version, then start to write."""
        self._ran_before_s, self.commit = await asyncio.to_thread(_prepare, self._path)
        self._began, self._noted_s = time.monotonic(), self._ran_before_s
        self._writer.start()

    def write(self, work: Callable[[JournalConnection], T], *, within_s: float = 0.0) -> asyncio.Future[T]:
        """Run ``work`` in the writer thread; the future resolves once its changes are durable, or fails.

        Args:
            within_s: Seconds for which it may wait for another write to commit with.
        """
        due_s = self._loop.time() + within_s if within_s else 0.0
        return self._ask(_Item(work, self._loop.create_future(), due_s=due_s))

    def _ask(self, item: _Item) -> asyncio.Future[Any]:
        self._asked.append(item)
        if item.due_s:
            self._wait_until(item.due_s)
        elif not self._handing_over:
            # Hand over after the loop's other callbacks, or the writer competes with them for the GIL.
            self._handing_over = True
            self._loop.call_soon(self._hand_over)
        return item.done

    def _wait_until(self, due_s: float) -> None:
        """Hand over at this time, by one timer for all that wait."""
        if self._due is not None:
            if self._due_s <= due_s:
                return
            self._due.cancel()
        self._due, self._due_s = self._loop.call_at(due_s, self._hand_over_due), due_s

    def _hand_over_due(self) -> None:
        self._due = None
        if not self._asked:
            return
        due_s = min(item.due_s for item in self._asked)
        if due_s > self._loop.time():  # those for whom the timer was set have joined a write
            self._wait_until(due_s)
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        self._handing_over = False
        asked, self._asked = self._asked, []
        if asked:
            self._queue.put(asked)

    def ran_s(self) -> float:
        """Seconds for which servers have run on this database, this one included."""
        return self._ran_before_s + time.monotonic() - self._began

    async def read(self, query: Query[T]) -> T:
        """Run a query in the reader thread; it sees the state that was committed when it started."""

        def run() -> T:
            if self._reading is None:
                self._reading = connect(self._path)
            return query(self._reading)

        if await self._is_in_file():
            return await self._loop.run_in_executor(self._reader, run)
        return await self.write(query)

    async def read_apart(self, query: Query[T]) -> T:
        """Run a query that takes long in a thread of its own; it sees the state that was committed when it started."""

        def run() -> T:
            with closing(connect(self._path)) as connection:
                return query(connection)

        if await self._is_in_file():
            return await asyncio.to_thread(run)
        return await self.write(query)

    async def put_into_file(self) -> None:
        """Let other connections see every commit.

        Raises:
            ServiceError: STORAGE_FULL.
            sqlite3.Error, OSError: The disk failed otherwise.
        """
        if self._open:
            await self._ask(_Item(lambda connection: None, self._loop.create_future(), into_file=True))

    async def _is_in_file(self) -> bool:
        """Whether other connections see every commit; if the disk is full or fails, only the writer may."""
        try:
            await self.put_into_file()
        except (ServiceError, sqlite3.Error, OSError):
            return False
        return True

    async def close(self) -> None:
        """Finish the requested writes, then stop the threads."""
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        if self._reading is not None:
            await self._loop.run_in_executor(self._reader, self._reading.close)
        self._reader.shutdown()

    def _write(self) -> None:
        connection = connect_as(JournalConnection, self._path)
        ending = False
        while not ending:
            items: list[_Item] = []
            wait_s = max(0.0, self._open_until_s - time.monotonic())
            try:
                while not items or (len(items) < MAX_GROUP and not self._queue.empty()):
                    asked = self._queue.get(timeout=wait_s if wait_s < math.inf else None)
                    if asked is None:
                        ending = True
                        break
                    items += asked
            except queue.Empty:
                pass
            if items:
                outcomes = self._commit(connection, items)
                self._loop.call_soon_threadsafe(_deliver, items, outcomes)
            if ending or time.monotonic() >= self._open_until_s:
                try:
                    self._put_into_file(connection)
                except (sqlite3.Error, OSError) as error:  # the segments have every commit
                    if self._storage_error(error) is error:
                        log.error("%s is not written, and tried again: %s", self._path, error)
        connection.close()

    def _commit(self, connection: JournalConnection, items: list[_Item]) -> list[Any]:
        outcomes: list[Any] = []
        began = time.perf_counter()
        before, self.noted, ran_s = self.commit, False, self.ran_s()
        try:
            if self._open_bytes > OPEN_BYTES:
                self._put_into_file(connection)
            self._begin_transaction(connection)
            self.commit += 1
            for item in items:
                made = len(connection.statements)
                try:
                    outcomes.append((item.work(connection), None))
                except Exception as error:  # passed on to the caller through the future
                    if not connection.in_transaction:  # SQLite took back the whole: the disk is full, or fails
                        raise
                    if len(connection.statements) > made:
                        self._take_back(connection, connection.statements[:made])
                    outcomes.append((None, self._storage_error(error)))
            if connection.statements:
                if not self.noted or ran_s >= self._noted_s + RAN_EVERY_S:
                    connection.execute("UPDATE state SET commits = ?, ran_s = ?", (self.commit, ran_s))
                    self._noted_s = ran_s
                description = description_of(connection.statements)
                self._segments.append((), description, self.commit)
                self._segments.sync()
                self._open += connection.statements
                self._open_bytes += len(description)
                self._open_until_s = min(self._open_until_s, time.monotonic() + OPEN_S)
            else:
                self.commit = before
                if not self._open:
                    connection.rollback()
        except Exception as error:  # passed on to all callers
            self.commit = before
            connection.rollback()
            self._segments.abandon()
            self.on_commit(len(items), time.perf_counter() - began, False)
            return [(None, self._storage_error(error))] * len(items)
        if any(item.into_file for item in items):
            try:
                self._put_into_file(connection)
            except (sqlite3.Error, OSError) as error:
                failed = None, self._storage_error(error)
                outcomes = [failed if item.into_file else each for item, each in zip(items, outcomes, strict=True)]
        self.on_commit(len(items), time.perf_counter() - began, True)
        return outcomes

    def _begin_transaction(self, connection: JournalConnection) -> None:
        """Go on in SQLite's transaction, or begin one with what was committed since the last one that was written."""
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")
            for sql, values, _ in self._open:
                connection.execute(sql, values)
        connection.statements.clear()

    def _take_back(self, connection: JournalConnection, kept: Sequence[Statement]) -> None:
        """Undo what a write changed before it failed: begin the transaction anew, with the group's other changes."""
        connection.rollback()
        self._begin_transaction(connection)
        for sql, values, _ in kept:
            connection.execute(sql, values)

    def _put_into_file(self, connection: JournalConnection) -> None:
        """End SQLite's transaction. If that fails, its statements stay for the next one.

        Raises:
            sqlite3.Error, OSError: It failed.
        """
        self._open_until_s = time.monotonic() + OPEN_S
        try:
            self._begin_transaction(connection)
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError):
            connection.rollback()
            raise
        self._open, self._open_bytes, self._open_until_s = [], 0, math.inf

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


def _prepare(path: Path) -> tuple[float, int]:
    """Bring a file to the present version; return its ``ran_s`` and its newest commit."""
    with closing(connect(path)) as connection:
        migrate(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        [(ran_s,)] = connection.execute("SELECT ran_s FROM state").fetchall()
        return float(ran_s), newest_commit(connection)
