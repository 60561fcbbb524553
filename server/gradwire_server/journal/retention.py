"""Deletion of what no recovery and no reader needs any more."""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial

from gradwire_server.journal.database import Database
from gradwire_server.journal.schema import OPERATION, give_back_space
from gradwire_server.journal.segments import Segments

COLLECTED_BYTES = 4 << 20
"""Size in bytes from which on a collection ends the segment that is being written, for a later one to delete it: short
operations would otherwise fill 64 MiB before the first of them goes."""


class Retention:
    """Deletion of operations that a checkpoint contains, and of segments to which no row refers; results expire."""

    def __init__(self, store: Database, segments: Segments) -> None:
        self._store, self._segments = store, segments

    def trim(self, run_id: str, up_to_seq: int) -> asyncio.Future[None]:
        """Delete operations that no recovery needs because a checkpoint contains them.

        The row of an operation whose result is not released stays, without its payload.
        """

        return self._store.write(partial(delete_trimmed, run_id=run_id, up_to_seq=up_to_seq))

    async def expired(self, after_s: float) -> dict[str, int]:
        """The highest number of a result that was stored more than ``after_s`` seconds of a server ago, by run id."""
        query = "SELECT run_id, max(seq) FROM results WHERE stored_at < ? GROUP BY run_id"
        rows = await self._store.read(
            lambda connection: connection.execute(query, (self._store.ran_s() - after_s,)).fetchall()
        )
        return dict(rows)

    async def collect(self) -> None:
        """Delete the segments to which no row refers.

        What a row of a closed segment says was committed before the segment is known to be closed, and no row refers
        to it later that did not before.
        """

        def end(connection: sqlite3.Connection) -> set[int]:
            give_back_space(connection)
            self._segments.end_file(COLLECTED_BYTES)
            return self._segments.closed()

        if closed := await self._store.write(end):
            # No closed segment has changes then that the database lacks.
            await self._store.put_into_file()
            kept = await self._store.read_apart(_referred_to)
            await asyncio.to_thread(self._segments.forget, closed - kept)


def delete_trimmed(connection: sqlite3.Connection, run_id: str, up_to_seq: int) -> None:
    """Delete operations of a run up to a number; see :meth:`Retention.trim`."""
    connection.execute(
        "DELETE FROM operations WHERE run_id = ? AND seq <= ?"
        " AND seq <= (SELECT released_seq FROM runs WHERE run_id = ?)",
        (run_id, up_to_seq, run_id),
    )
    connection.execute(
        "UPDATE operations SET segment = NULL, offset = NULL, outcome_segment = NULL,"
        f" digest = {OPERATION.replace('segment, offset', 'NULL, NULL')}"
        " WHERE run_id = ? AND seq <= ? AND (segment IS NOT NULL OR outcome_segment IS NOT NULL)",
        (run_id, up_to_seq),
    )
    connection.execute("DELETE FROM uses WHERE run_id = ? AND seq <= ?", (run_id, up_to_seq))
    connection.execute("UPDATE runs SET trimmed_seq = max(trimmed_seq, ?) WHERE run_id = ?", (up_to_seq, run_id))


def _referred_to(connection: sqlite3.Connection) -> set[int]:
    """The segments to which rows refer; reads every row, because an index would cost each operation a page."""
    query = (
        "SELECT segment FROM operations UNION SELECT outcome_segment FROM operations WHERE outcome_segment IS NOT NULL"
        " UNION SELECT segment FROM results WHERE segment IS NOT NULL"
    )
    return {number for (number,) in connection.execute(query) if number is not None}
