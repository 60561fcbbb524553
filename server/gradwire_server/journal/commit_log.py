"""The changes of each commit, recorded in the segments, and how they bring a database up to date.

A commit is durable once its record is: the last of its records in the segment, and synced with them by one call. Its
rows are in a transaction of SQLite that stays open and is committed with those of many others (:mod:`.database`). A
crash may leave a database that ends some commits before the segments; the changes of those are then made again. Of an
operation or a result the record of the commit names only where its record is (:mod:`.rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gradwire_proto.v1 import journal_pb2

from gradwire_server.journal.rows import Row, rows_of
from gradwire_server.journal.schema import VERSION, connect, newest_commit, version_of
from gradwire_server.journal.segments import CorruptRecord, Location, Segments

log = logging.getLogger(__name__)


class Statement(NamedTuple):
    """A change in the database: SQL, the values of its parameters, and the record of which it is a row, if it is."""

    sql: str
    values: Sequence[Any]
    record: Location | None = None


_FIELDS: Mapping[type[Any], str] = {int: "integer", float: "real", str: "text", bytes: "blob"}
TRANSACTIONS = ("BEGIN", "COMMIT")
"""How the statements begin that change no row."""


def description_of(statements: Sequence[Statement]) -> bytes:
    """The description of the record that ends a commit; it names the other records instead of repeating their rows."""
    if named := [each.sql for each in statements if isinstance(each.values, Mapping)]:
        raise TypeError(f"the values of a change are given by position: {named[0]}")
    described: Any = []
    for record, changes in groupby(statements, key=lambda each: each.record):
        if record is None:
            described += [{"sql": sql, "values": [*map(_value, values)]} for sql, values, _ in changes]
        else:
            described.append({"record": {"segment": record.segment, "offset": record.offset}})
    return journal_pb2.JournalRecord(statements=described).SerializeToString()


def bring_up_to_date(database: Path, segments: Segments) -> int:
    """Execute in a database what the segments have of the commits after its newest one.

    Nothing is changed where the segments do not have all of them: then the database is an older copy
    (:func:`.state_folder.check`). The newest commit may be torn by the crash; nobody was told that it was done.

    Returns:
        The newest commit of which the segments have a whole record; 0 for a database from before they had any.

    Raises:
        sqlite3.DatabaseError: The database cannot be read.
    """
    if not database.exists():
        return 0
    with closing(connect(database)) as connection:
        if not 2 <= version_of(connection) <= VERSION:
            return 0
        newest, last = newest_commit(connection), segments.last_commit()
        commits = _commits_after(newest, segments) if last > newest else {}
        if not commits or any(number not in commits for number in range(newest + 1, last)):
            return last
        connection.execute("BEGIN IMMEDIATE")
        for _, rows in sorted(commits.items()):
            for sql, values in rows:
                connection.execute(sql, values).fetchall()
        connection.execute("COMMIT")
    log.info("%s: the changes of %d commits are made again, which a crash had left out", database, len(commits))
    return last


def _commits_after(newest: int, segments: Segments) -> dict[int, list[Row]]:
    """The changes of each commit after one; of a number that was used twice, those that were written last."""
    ends, records = dict[int, journal_pb2.JournalRecord](), dict[Location, list[Row]]()
    for number in reversed(segments.numbers()):
        here, before = dict[int, journal_pb2.JournalRecord](), False
        try:
            for found in segments.records(number):
                before = before or found.commit <= newest
                if found.commit > newest and found.description:
                    record = journal_pb2.JournalRecord.FromString(found.description)
                    if record.statements:
                        here[found.commit] = record
                    else:
                        rows = rows_of(record, found.location, found.payload_bytes, found.commit)
                        records[found.location] = list(rows)
        except CorruptRecord:
            pass  # torn by the crash, or a number is missing, which the caller sees
        ends = here | ends
        if before:
            break
    commits = dict[int, list[Row]]()
    for number, end in ends.items():
        with suppress(KeyError):  # a record of it cannot be read: the number is missing, too
            commits[number] = [row for each in end.statements for row in _rows(each, records)]
    return commits


def _rows(statement: journal_pb2.Statement, records: Mapping[Location, list[Row]]) -> list[Row]:
    if statement.HasField("record"):
        return records[Location(statement.record.segment, statement.record.offset)]
    return [(statement.sql, [*map(_get, statement.values)])]


def _value(value: object) -> dict[str, object]:
    if value is None:
        return {}
    field = _FIELDS.get(type(value))
    if field is not None:
        return {field: value}
    for kind, field in _FIELDS.items():
        if isinstance(value, kind):  # a truth value is a number here
            return {field: kind(value)}
    return {"blob": bytes(value)}  # type: ignore[call-overload]


def _get(stored: journal_pb2.Value) -> Any:
    kind = stored.WhichOneof("kind")
    return None if kind is None else getattr(stored, kind)
