"""The journal: operations on disk before they are acknowledged, results on disk before they are delivered.

Operations and results are rows of the database, and records in segment files beside it, which hold their payloads and
all that is needed to make the rows again: after a crash (:mod:`.commit_log`), and where the database is lost
(:mod:`.repair`). In an operation's row, ``segment`` names the file that is
kept for its record, and ``offset`` is NULL where that has no payload; a result's record is kept for its payload only,
and that of a failure for as long as the operation's row. The scheduler
decides the order of operations; the journal only enforces it: an operation is appended only if the previous number is
the last one in the journal.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.crash_points import crash_point
from gradwire_server.errors import ServiceError
from gradwire_server.journal import history
from gradwire_server.journal.database import Database, JournalConnection
from gradwire_server.journal.retention import Retention
from gradwire_server.journal.rows import JournalEntry, RunMarks, StoredResult, digest_of, lost_result, rows_of
from gradwire_server.journal.same_state import RunFacts
from gradwire_server.journal.schema import OPERATION, RESULT
from gradwire_server.journal.segments import SEGMENT_BYTES, Buffer, CorruptRecord, Location, Segments
from gradwire_server.journal.state_folder import DATABASE, SEGMENTS
from gradwire_server.limits import Limits

log = logging.getLogger(__name__)

LATER_S = 0.25
"""How long a release of results waits for another write; the call that asks for it holds its turn meanwhile."""
READ_BYTES = 8 << 20
"""Approximate number of bytes of result payloads that are read at a time."""


class Journal:
    """The journal of all runs of a state folder; made by :meth:`open`.

    Attributes:
        retention: Deletes what is no longer needed.
        facts: The facts that each run was computed with.
    """

    def __init__(
        self, store: Database, segments: Segments, keep_payloads: bool, history_points: int, accept_changes: bool
    ) -> None:
        self.store, self.segments = store, segments
        self.retention = Retention(store, segments)
        self.facts = RunFacts(store, accept_changes)
        self.keep_payloads, self._history_points = keep_payloads, history_points

    @classmethod
    async def open(
        cls,
        state_dir: Path,
        *,
        keep_payloads: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        history_points: int = Limits().max_history_points,
        accept_changes: bool = False,
    ) -> Journal:
        """Bring the database to the present version, and open it for writing and reading until :meth:`close`.

        Args:
            state_dir: Folder of ``gradwire.db`` and ``journal/``, which :func:`.state_folder.check` has brought up to
                date.
            keep_payloads: False for ``durability=checkpoint``: operations are recorded, but cannot be replayed.
            segment_bytes: Size in bytes from which on a new segment file is begun.
            history_points: Points of a run's record; see :mod:`.history`.
            accept_changes: Whether runs go on with something other than what they were computed with.
        """
        segments = Segments(state_dir / SEGMENTS, segment_bytes)
        store = Database(state_dir / DATABASE, segments)
        await store.open()
        return cls(store, segments, keep_payloads, history_points, accept_changes)

    # ---- operations ----

    def append(
        self,
        header: pb.OperationHeader,
        accepted_at: float,
        payload: Sequence[Buffer],
        *,
        within_s: float = 0.0,
    ) -> asyncio.Future[Location | None]:
        """Append an operation; the future resolves with the location of its payload once it is durable.

        Args:
            within_s: Seconds for which it may wait for another write to commit with.

        Raises (through the future):
            ServiceError: STORAGE_FULL.
            LookupError: The previous number is not in the journal, because its own append failed.
        """

        record = journal_pb2.JournalRecord(run_id=header.run_id, seq=header.seq, at=accepted_at, operation=header)

        def work(connection: JournalConnection) -> Location | None:
            query = "SELECT 1 FROM runs WHERE run_id = ? AND accepted_seq = ?"
            if connection.execute(query, (header.run_id, header.seq - 1)).fetchone() is None:
                raise LookupError(f"operation {header.seq - 1} of {header.run_id} is not in the journal")
            location = self._enter(connection, record, payload, kept=self.keep_payloads)
            crash_point("operation.before_commit")
            return location if any(map(len, payload)) else None

        return self.store.write(work, within_s=within_s)

    async def identity_of(self, run_id: str, seq: int) -> bytes | None:
        """Identity of a journaled operation; None if it was trimmed."""
        query = "SELECT identity FROM operations WHERE run_id = ? AND seq = ?"
        row = await self.store.read(lambda connection: connection.execute(query, (run_id, seq)).fetchone())
        return row[0] if row else None

    async def entries(self, run_id: str, after_seq: int, up_to_seq: int) -> list[JournalEntry]:
        """Operations of a run with numbers in ``(after_seq, up_to_seq]``, in order, without their payloads."""
        query = (
            f"SELECT seq, header, identity, accepted_at, status, deaths, segment, offset, outcome,"
            " coalesce(CAST(replay_s AS REAL), 0.0),"
            f" digest = {OPERATION} FROM operations WHERE run_id = ? AND seq > ? AND seq <= ? ORDER BY seq"
        )
        rows = await self.store.read(
            lambda connection: connection.execute(query, (run_id, after_seq, up_to_seq)).fetchall()
        )
        return [
            JournalEntry(
                pb.OperationHeader.FromString(header),
                content,
                at,
                status,
                deaths,
                _location(segment, offset),
                outcome=outcome,
                replay_s=replay_s,
            )
            if whole
            else JournalEntry(
                pb.OperationHeader(run_id=run_id, seq=seq), content, at, status, deaths, None, damaged=True
            )
            for seq, header, content, at, status, deaths, segment, offset, outcome, replay_s, whole in rows
        ]

    async def payload(self, location: Location) -> bytearray:
        """Read a payload.

        Raises:
            CorruptRecord: The bytes are not those that were written.
        """
        return await asyncio.to_thread(self.segments.read, location)

    async def replay_s(self, after: Mapping[str, int]) -> dict[str, float]:
        """Seconds that the engine took for operations that a recovery would replay, by run id.

        Args:
            after: Run id -> the number after which a recovery would replay.
        """
        query = "SELECT total(replay_s) FROM operations WHERE run_id = ? AND seq > ?"
        return await self.store.read(
            lambda connection: {
                run_id: connection.execute(query, (run_id, seq)).fetchone()[0] for run_id, seq in after.items()
            }
        )

    def count_death(self, run_id: str, seq: int) -> asyncio.Future[None]:
        """Record that the engine died while it executed an operation."""

        def work(connection: sqlite3.Connection) -> None:
            query = "UPDATE operations SET deaths = deaths + 1 WHERE run_id = ? AND seq = ?"
            connection.execute(query, (run_id, seq))

        return self.store.write(work)

    # ---- results ----

    def put_result(
        self,
        run_id: str,
        result: pb.OperationResult,
        payload: Sequence[Buffer],
        marks: RunMarks,
        *,
        saved: bool = False,
        kept: journal_pb2.Kept.ValueType = journal_pb2.KEPT_REPLAYED,
        point: pb.HistoryPoint | None = None,
        with_operation: bool = False,
        within_s: float = 0.0,
    ) -> asyncio.Future[None]:
        """Store a result, the changes to its run's row, its checkpoint, and its point in the run's record.

        A result that is already stored is not replaced. Results are stored in order, except cancellations: what aborted
        an operation is in the journal before the operation's own result, so that after a crash the marks are those of
        the first operation that is executed again.

        Args:
            saved: Whether the result's checkpoint is a new one of the run.
            kept: Why the operation's record and its outcome are kept, if they are.
            point: The operation's figures.
            with_operation: Whether the operation is still being appended.
            within_s: Seconds for which it may wait for another write to commit with.

        Raises (through the future):
            LookupError: An earlier operation has no result in the journal, because storing it failed; or the operation
                itself was not appended.
            ServiceError: STORAGE_FULL.
        """

        record = journal_pb2.JournalRecord(
            run_id=run_id, seq=result.seq, result=result, step=marks.step, failure_seq=marks.failure_seq,
            failure=marks.failure, point=point, kept=kept, saved=saved, config=marks.config,
            num_trainable_parameters=marks.num_trainable_parameters,
        )  # fmt: skip

        def work(connection: JournalConnection) -> None:
            if result.status != pb.STATUS_CANCELLED and _is_early(connection, run_id, result.seq):
                raise LookupError(f"an operation of {run_id} before {result.seq} has no result in the journal")
            failed = result.status != pb.STATUS_SUCCEEDED
            operation = _header_of(connection, run_id, result.seq) if failed or with_operation else None
            if with_operation and operation is None:
                raise LookupError(f"operation {result.seq} of {run_id} is not in the journal")
            record.at, record.stored_s = time.time(), self.store.ran_s()
            if kept != journal_pb2.KEPT_NOT:
                record.outcome.payload_digest = digest_of(payload)
            if failed and operation is not None:
                record.operation.MergeFromString(operation)
            self._enter(connection, record, payload, kept=self.keep_payloads or any(map(len, payload)))
            crash_point("result.before_commit")

        return self.store.write(work, within_s=within_s)

    async def results(self, run_id: str, from_seq: int, up_to_seq: int, limit: int = 64) -> list[StoredResult]:
        """Stored results in order, at most ``limit`` and about ``READ_BYTES`` of them, at least one if one exists."""
        query = (
            f"SELECT seq, header, segment, offset, digest = {RESULT} FROM results"
            " WHERE run_id = ? AND seq >= ? AND seq <= ? ORDER BY seq LIMIT ?"
        )

        def read(connection: sqlite3.Connection) -> list[StoredResult]:
            stored, size = list[StoredResult](), 0
            for seq, header, segment, offset, whole in connection.execute(query, (run_id, from_seq, up_to_seq, limit)):
                stored.append(
                    _with_payload(self.segments, pb.OperationResult.FromString(header), _location(segment, offset))
                    if whole
                    else lost_result(seq)
                )
                size += len(stored[-1].payload)
                if size >= READ_BYTES:
                    break
            return stored

        return await self.store.read(read)

    def release(self, run_id: str, up_to_seq: int) -> asyncio.Future[None]:
        """Delete results up to a number; the rows of their operations stay. Joins a later write."""

        def work(connection: sqlite3.Connection) -> None:
            history.settle(connection, run_id, up_to_seq, self._history_points)
            connection.execute("DELETE FROM results WHERE run_id = ? AND seq <= ?", (run_id, up_to_seq))
            connection.execute(
                "UPDATE runs SET released_seq = max(released_seq, ?) WHERE run_id = ?", (up_to_seq, run_id)
            )

        return self.store.write(work, within_s=LATER_S)

    async def history(self, run_id: str, at_most: int = 0) -> AsyncIterator[list[pb.HistoryPoint]]:
        """Yield the points of a run's record in order; each list holds at least one.

        Args:
            at_most: About so many points of a longer record, evenly thinned; 0 for all.

        Where the disk is full, the newest points may be more than the record will keep of them.
        """
        waiting = await self.store.read(partial(history.all_waiting, run_id=run_id))
        if waiting:
            settle = partial(history.settle, run_id=run_id, up_to_seq=sys.maxsize, max_points=self._history_points)
            try:
                await self.store.write(settle)
                waiting = []
            except ServiceError as error:
                if error.code != pb.ERROR_CODE_STORAGE_FULL:
                    raise
        spacing = await self.store.read(partial(history.spacing, run_id=run_id, at_most=at_most)) if at_most else {}
        after, last = 0, -1
        while after != last:
            last = after
            points, after = await self.store.read(partial(history.page, run_id=run_id, after=last, spacing=spacing))
            if points:
                yield points
        if waiting:
            yield waiting

    def rewind(self, run_id: str, to_seq: int, step: int) -> asyncio.Future[None]:
        """Delete every operation and result after ``to_seq``, and fence the present writer with a new epoch."""

        def work(connection: sqlite3.Connection) -> None:
            for table in ("operations", "results", "uses"):
                connection.execute(f"DELETE FROM {table} WHERE run_id = ? AND seq > ?", (run_id, to_seq))
            history.rewind(connection, run_id, to_seq)
            connection.execute(
                "UPDATE runs SET accepted_seq = ?, applied_seq = min(applied_seq, ?), step = ?, failure_seq = 0,"
                " failure = '', rewound_to_seq = ?, rewound_epoch = epoch, epoch = epoch + 1, writer = ''"
                " WHERE run_id = ?",
                (to_seq, to_seq, step, to_seq, run_id),
            )

        return self.store.write(work)

    def _enter(
        self, connection: JournalConnection, record: journal_pb2.JournalRecord, payload: Sequence[Buffer], *, kept: bool
    ) -> Location | None:
        """Add a record to the segments, if it is kept, and its rows to the database; return where it is."""
        commit, location = self.store.commit, None
        if kept:
            location = self.segments.append(payload, record.SerializeToString(), commit)
        changed = connection.enter(rows_of(record, location, sum(map(len, payload)), commit), location)
        self.store.noted = self.store.noted or changed.rowcount == 1
        return location

    async def close(self) -> None:
        """Finish the requested writes and close the files."""
        await self.store.close()
        self.segments.close()


def _is_early(connection: sqlite3.Connection, run_id: str, seq: int) -> bool:
    """Whether an earlier operation has no result yet."""
    query = (
        "SELECT 1 FROM operations WHERE run_id = ?1 AND seq > (SELECT applied_seq FROM runs WHERE run_id = ?1)"
        " AND seq < ?2 AND status = 0 LIMIT 1"
    )
    return connection.execute(query, (run_id, seq)).fetchone() is not None


def _header_of(connection: sqlite3.Connection, run_id: str, seq: int) -> bytes | None:
    query = "SELECT header FROM operations WHERE run_id = ? AND seq = ?"
    row = connection.execute(query, (run_id, seq)).fetchone()
    return row[0] if row else None


def _location(segment: int | None, offset: int | None) -> Location | None:
    return None if segment is None or offset is None else Location(segment, offset)


def _with_payload(segments: Segments, result: pb.OperationResult, location: Location | None) -> StoredResult:
    if location is None:
        return StoredResult(result, b"")
    try:
        return StoredResult(result, segments.read(location))
    except CorruptRecord:
        return lost_result(result.seq)
