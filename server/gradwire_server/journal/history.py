"""The record of every run: what each operation that succeeded measured, in the order of execution.

A record holds a bounded number of points. When it is full, the operations of the kind with the most points are thinned:
every second one goes, and from then on only every second, fourth, eighth one is recorded. So the points of a kind are
evenly spaced over the whole run, and a rare kind keeps all of its own.

The functions take the database's connection. A point is written in the transaction that stores its operation's result,
beside that (:func:`waiting`), and moved into the record later, together with others: at the latest when the result is
released, or the record read.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
import time
from collections.abc import Iterable, Mapping

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.operation_kinds import has_loss, has_step, loss_call, loss_result, step_result

PAGE_POINTS = 512
"""Points read at a time."""
_DIGEST_BYTES = 16

TABLES = (
    """CREATE TABLE IF NOT EXISTS history (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL,
    made_by TEXT NOT NULL,
    seq INTEGER NOT NULL,
    operation TEXT NOT NULL,
    number INTEGER NOT NULL,
    point BLOB NOT NULL,
    digest BLOB NOT NULL
)""",
    "CREATE INDEX IF NOT EXISTS history_by_run ON history (run_id, operation)",
    """CREATE TABLE IF NOT EXISTS history_kinds (
    run_id TEXT NOT NULL,
    operation TEXT NOT NULL,
    seen INTEGER NOT NULL,
    kept INTEGER NOT NULL,
    every INTEGER NOT NULL,
    PRIMARY KEY (run_id, operation)
)""",
)
"""In ``history``, ``run_id`` is the run with the point in its record, ``made_by`` the one that executed the operation
(they differ for points that a fork took over), and ``number`` counts the record's operations of that kind.
``history_kinds`` holds how many operations of a kind a record has seen, how many points it keeps of them, and the
spacing of these."""

CLUSTERED = (
    """CREATE TABLE clustered_history (
    run_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    made_by TEXT NOT NULL,
    seq INTEGER NOT NULL,
    operation TEXT NOT NULL,
    number INTEGER NOT NULL,
    point BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (run_id, position)
) WITHOUT ROWID""",
    "INSERT INTO clustered_history (run_id, position, made_by, seq, operation, number, point, digest)"
    " SELECT run_id, position, made_by, seq, operation, number, point, digest FROM history",
    "DROP TABLE history",
    "ALTER TABLE clustered_history RENAME TO history",
    """CREATE TABLE clustered_kinds (
    run_id TEXT NOT NULL,
    operation TEXT NOT NULL,
    seen INTEGER NOT NULL,
    kept INTEGER NOT NULL,
    every INTEGER NOT NULL,
    PRIMARY KEY (run_id, operation)
) WITHOUT ROWID""",
    "INSERT INTO clustered_kinds SELECT run_id, operation, seen, kept, every FROM history_kinds",
    "DROP TABLE history_kinds",
    "ALTER TABLE clustered_kinds RENAME TO history_kinds",
)
"""The same tables, each of them the index of its key; ``position`` counts within a record."""


def history_point(
    run_id: str, operation: pb.Operation, result: pb.OperationResult, step: int
) -> pb.HistoryPoint | None:
    """Make the point of an operation in its run's record; None for one that did not succeed.

    Args:
        step: Optimizer steps taken when it was done, its own included.
    """
    if result.status != pb.STATUS_SUCCEEDED:
        return None
    kind = operation.WhichOneof("kind") or ""
    point = pb.HistoryPoint(
        run_id=run_id, seq=result.seq, operation=kind, step=step, seconds=result.timings.engine_s, time=time.time()
    )
    call = loss_call(operation)
    if call is not None:
        point.loss_fn = call.loss_fn
    if has_loss(result):
        loss = loss_result(result)
        if loss.HasField("loss"):
            point.loss = loss.loss
        for name, value in loss.metrics.items():
            if name != "loss":
                point.metrics[name] = value
        point.tokens = loss.num_tokens
    if has_step(result):
        step_done = step_result(result)
        point.learning_rate, point.grad_norm = step_done.learning_rate, step_done.grad_norm
    elif result.HasField("sample"):
        point.tokens = result.sample.num_prompt_tokens + result.sample.num_sampled_tokens
    return point


def waiting(point: pb.HistoryPoint | None) -> bytes | None:
    """A point as it waits beside its operation's result: with a digest."""
    if point is None:
        return None
    content = point.SerializeToString(deterministic=True)
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content


def parse_waiting(raw: bytes) -> pb.HistoryPoint | None:
    """A point that waits; None if its bytes are not what was written."""
    content = raw[_DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != raw[:_DIGEST_BYTES]:
        return None
    return pb.HistoryPoint.FromString(content)


def settle(connection: sqlite3.Connection, run_id: str, up_to_seq: int, max_points: int | None) -> None:
    """Move the points that wait beside results up to a number into the run's record.

    Args:
        max_points: As for :func:`add`.
    """
    if points := all_waiting(connection, run_id, up_to_seq):
        add(connection, run_id, points, max_points)
    query = "UPDATE results SET point = NULL WHERE run_id = ? AND seq <= ? AND point IS NOT NULL"
    connection.execute(query, (run_id, up_to_seq))


def all_waiting(connection: sqlite3.Connection, run_id: str, up_to_seq: int = sys.maxsize) -> list[pb.HistoryPoint]:
    """The points of a run that wait for their place in its record, but for damaged ones."""
    query = "SELECT point FROM results WHERE run_id = ? AND seq <= ? AND point IS NOT NULL ORDER BY seq"
    found = [parse_waiting(raw) for (raw,) in connection.execute(query, (run_id, up_to_seq)).fetchall()]
    return [point for point in found if point is not None]


def add(connection: sqlite3.Connection, run_id: str, points: Iterable[pb.HistoryPoint], max_points: int | None) -> None:
    """Add points to a run's record, except those that fall between points that are kept.

    Args:
        max_points: Points that the record may hold; None to leave thinning it to a later call.
    """
    query = "SELECT operation, seen, every FROM history_kinds WHERE run_id = ?"
    kinds = {operation: (seen, every) for operation, seen, every in connection.execute(query, (run_id,)).fetchall()}
    query = "SELECT coalesce(max(position), 0) FROM history WHERE run_id = ?"
    [(position,)] = connection.execute(query, (run_id,)).fetchall()
    changed: dict[str, list[int]] = {}
    for point in points:
        number, every = kinds.get(point.operation, (0, 1))
        kinds[point.operation] = number + 1, every
        counts = changed.setdefault(point.operation, [0, 0])
        counts[0] += 1
        if number % every == 0:
            counts[1] += 1
            position += 1
            connection.execute(
                "INSERT INTO history (run_id, position, made_by, seq, operation, number, point, digest)"
                " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, digest(?3, ?4, ?5, ?6, ?7))",
                (run_id, position, point.run_id, point.seq, point.operation, number, point.SerializeToString()),
            )
    for operation, (seen, kept) in changed.items():
        connection.execute(
            "INSERT INTO history_kinds VALUES (?1, ?2, ?3, ?4, 1)"
            " ON CONFLICT DO UPDATE SET seen = seen + ?3, kept = kept + ?4",
            (run_id, operation, seen, kept),
        )
    if changed and max_points is not None:
        _thin(connection, run_id, max_points)


def _thin(connection: sqlite3.Connection, run_id: str, max_points: int) -> None:
    query = "SELECT sum(kept), max(kept), operation, every FROM history_kinds WHERE run_id = ?"
    while True:
        total, _, operation, every = connection.execute(query, (run_id,)).fetchone()  # of the row with max(kept)
        if total <= max_points:
            return
        dropped = connection.execute(
            "DELETE FROM history WHERE run_id = ? AND operation = ? AND number % ? != 0", (run_id, operation, 2 * every)
        ).rowcount
        connection.execute(
            "UPDATE history_kinds SET every = ?, kept = kept - ? WHERE run_id = ? AND operation = ?",
            (2 * every, dropped, run_id, operation),
        )


def copy(connection: sqlite3.Connection, source: str, up_to_seq: int, run_id: str) -> None:
    """Begin a fork's record with its source's, up to the source's operation ``up_to_seq``."""
    settle(connection, source, up_to_seq, None)
    connection.execute(
        "INSERT INTO history (run_id, position, made_by, seq, operation, number, point, digest)"
        " SELECT ?, position, made_by, seq, operation, number, point, digest FROM history"
        " WHERE run_id = ? AND (made_by != ? OR seq <= ?) ORDER BY position",
        (run_id, source, source, up_to_seq),
    )
    connection.execute(
        "INSERT INTO history_kinds SELECT ?1, operation, max(number) + 1, count(*), (SELECT every FROM history_kinds"
        " AS theirs WHERE theirs.run_id = ?2 AND theirs.operation = history.operation)"
        " FROM history WHERE run_id = ?1 GROUP BY operation",
        (run_id, source),
    )


def rewind(connection: sqlite3.Connection, run_id: str, to_seq: int) -> None:
    """Take out the points of operations that a rewind has made void."""
    connection.execute("DELETE FROM history WHERE run_id = ? AND made_by = ? AND seq > ?", (run_id, run_id, to_seq))
    connection.execute(
        "UPDATE history_kinds SET kept = (SELECT count(*) FROM history WHERE history.run_id = history_kinds.run_id"
        " AND history.operation = history_kinds.operation) WHERE run_id = ?",
        (run_id,),
    )


def delete(connection: sqlite3.Connection, run_id: str) -> None:
    """Delete a run's record."""
    for table in ("history", "history_kinds"):
        connection.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))


def spacing(connection: sqlite3.Connection, run_id: str, at_most: int) -> dict[str, tuple[int, int]]:
    """Spacing of the numbers to read, by kind of operation, for about this many points, and the newest number, which
    is read as well; {} to read all."""
    query = "SELECT operation, kept, every, seen FROM history_kinds WHERE run_id = ?"
    kinds = connection.execute(query, (run_id,)).fetchall()
    more = -(-sum(kept for _, kept, _, _ in kinds) // at_most)
    if more <= 1:
        return {}
    return {operation: (every * more, (seen - 1) // every * every) for operation, _, every, seen in kinds}


def page(
    connection: sqlite3.Connection, run_id: str, after: int, spacing: Mapping[str, tuple[int, int]]
) -> tuple[list[pb.HistoryPoint], int]:
    """The next points of a record and the position of the last; a point that was damaged on disk is left out.

    Args:
        after: Position after which to read; 0 for the beginning.
        spacing: As from :func:`spacing`; empty for every point.
    """
    chosen = " OR ".join("(operation = ? AND (number % ? = 0 OR number = ?))" for _ in spacing)
    numbers = [value for operation, (every, newest) in spacing.items() for value in (operation, every, newest)]
    rows = connection.execute(
        "SELECT position, point, digest = digest(made_by, seq, operation, number, point) FROM history"
        f" WHERE run_id = ? AND position > ? {f'AND ({chosen})' if chosen else ''} ORDER BY position LIMIT ?",
        (run_id, after, *numbers, PAGE_POINTS),
    ).fetchall()
    return [pb.HistoryPoint.FromString(point) for _, point, whole in rows if whole], rows[-1][0] if rows else after
