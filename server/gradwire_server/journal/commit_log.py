"""What each commit changed in the database, recorded in the segments, and a database that is behind them.

A commit is durable once its record is: the last of its records in the segment, and synced with them by one call. Its
rows are in a transaction of SQLite that stays open and is committed with those of many others (:mod:`.database`). A
crash may leave a database that ends some commits before the segments; the statements of those are then executed again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import journal_pb2

from gradwire_server.journal.schema import VERSION, connect, newest_commit, version_of
from gradwire_server.journal.segments import CorruptRecord, Segments

log = logging.getLogger(__name__)

Statement = tuple[str, Sequence[Any]]
"""SQL and the values of its parameters."""
_FIELDS: Mapping[type[Any], str] = {int: "integer", float: "real", str: "text", bytes: "blob"}
TRANSACTIONS = ("BEGIN", "COMMIT")
"""How the statements begin that change no row."""


def description_of(statements: Sequence[Statement]) -> bytes:
    """The description of the record that ends a commit."""
    if named := [sql for sql, values in statements if isinstance(values, Mapping)]:
        raise TypeError(f"the values of a change are given by position: {named[0]}")
    described: Any = [{"sql": sql, "values": [*map(_value, values)]} for sql, values in statements]
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
        for _, statements in sorted(commits.items()):
            for sql, values in statements:
                connection.execute(sql, values).fetchall()
        connection.execute("COMMIT")
    log.info("%s: the changes of %d commits are made again, which a crash had left out", database, len(commits))
    return last


def _commits_after(newest: int, segments: Segments) -> dict[int, list[Statement]]:
    """The changes of each commit after one; of a number that was used twice, those that were written last."""
    commits: dict[int, list[Statement]] = {}
    for number in reversed(segments.numbers()):
        here, before = dict[int, list[Statement]](), False
        try:
            for record in segments.records(number):
                before = before or record.commit <= newest
                if record.commit > newest and record.description:
                    parsed = journal_pb2.JournalRecord.FromString(record.description)
                    if parsed.statements:
                        here[record.commit] = [(each.sql, [*map(_get, each.values)]) for each in parsed.statements]
        except CorruptRecord:
            pass  # torn by the crash, or a number is missing, which the caller sees
        commits = here | commits
        if before:
            break
    return commits


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
