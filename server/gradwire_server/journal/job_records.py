"""The rows of jobs, of their events, and of files."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError
from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.journal.database import Database

log = logging.getLogger(__name__)

M = TypeVar("M", jobs.Job, jobs.File)

NEWEST = 1 << 62
"""Above the numbers of all events."""


@dataclass(frozen=True)
class StoredJob:
    """A job with what tells a repeated creation from another."""

    job: jobs.Job
    idempotency_key: str
    request: bytes


class JobRecords:
    """Reads and writes the rows; a write is on disk when its future resolves."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> list[StoredJob]:
        """Read every job, oldest first."""
        query = "SELECT job, idempotency_key, request FROM jobs ORDER BY created_at, job_id"
        rows = await self._database.read(lambda connection: connection.execute(query).fetchall())
        return [StoredJob(job, key, request) for raw, key, request in rows if (job := _parsed(jobs.Job, raw))]

    def insert(self, stored: StoredJob, events: Sequence[jobs.JobEvent]) -> asyncio.Future[None]:
        """Add a job with its first events."""
        job = stored.job
        row = (job.job_id, job.owner, job.created_at, stored.idempotency_key, stored.request, job.SerializeToString())

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?)", row)
            _add_events(connection, job.job_id, events)

        return self._database.write(work)

    def update(self, job: jobs.Job, events: Sequence[jobs.JobEvent] = ()) -> asyncio.Future[None]:
        """Replace a job, and add events to it; metrics of a step are merged with those that it has."""
        job_id, content = job.job_id, job.SerializeToString()

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE jobs SET job = ? WHERE job_id = ?", (content, job_id))
            _add_events(connection, job_id, events)

        return self._database.write(work)

    def delete(self, job_id: str) -> asyncio.Future[None]:
        """Delete a job with its events."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
            connection.execute("DELETE FROM job_events WHERE job_id = ?", (job_id,))

        return self._database.write(work)

    async def events(self, job_id: str, after: int, limit: int, *, oldest_first: bool) -> list[jobs.JobEvent]:
        """Read events beyond the number ``after``; 0 begins at the end that comes first."""
        order, beyond = ("ASC", ">") if oldest_first else ("DESC", "<")
        query = f"SELECT number, event FROM job_events WHERE job_id = ? AND number {beyond} ? ORDER BY number {order}"
        start = min(after, NEWEST) if after or oldest_first else NEWEST
        rows = await self._database.read(
            lambda connection: connection.execute(f"{query} LIMIT ?", (job_id, start, limit)).fetchall()
        )
        return [_event(number, content) for number, content in rows]


class FileRecords:
    """The rows of files."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> list[tuple[jobs.File, str]]:
        """Read every file with its idempotency key."""
        query = "SELECT file, idempotency_key FROM files"
        rows = await self._database.read(lambda connection: connection.execute(query).fetchall())
        return [(file, key) for raw, key in rows if (file := _parsed(jobs.File, raw))]

    def insert(self, file: jobs.File, idempotency_key: str) -> asyncio.Future[None]:
        """Add a file."""
        row = (file.file_id, idempotency_key, file.SerializeToString())

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO files VALUES (?, ?, ?)", row)

        return self._database.write(work)

    def delete(self, file_ids: Iterable[str]) -> asyncio.Future[None]:
        """Delete files."""
        rows = [(file_id,) for file_id in file_ids]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM files WHERE file_id = ?", rows)

        return self._database.write(work)


def _parsed(kind: type[M], raw: bytes) -> M | None:
    """A row's message; None, said in the log, for one that was damaged on disk."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        log.error("a row of %s is damaged and left out", kind.__name__)
        return None


def _add_events(connection: sqlite3.Connection, job_id: str, events: Sequence[jobs.JobEvent]) -> None:
    if not events:
        return
    [(newest,)] = connection.execute("SELECT max(number) FROM job_events WHERE job_id = ?", (job_id,)).fetchall()
    number = newest or 0
    for event in events:
        known = None
        if event.step:
            query = "SELECT number, event FROM job_events WHERE job_id = ? AND step = ?"
            known = connection.execute(query, (job_id, event.step)).fetchone()
        if known is None:
            number += 1
            row = (job_id, number, event.step, event.SerializeToString())
            connection.execute("INSERT INTO job_events VALUES (?, ?, ?, ?)", row)
            continue
        merged = _event(*known)
        merged.data = json.dumps(json.loads(merged.data or "{}") | json.loads(event.data or "{}"))
        merged.message = event.message
        change = "UPDATE job_events SET event = ? WHERE job_id = ? AND number = ?"
        connection.execute(change, (merged.SerializeToString(), job_id, known[0]))


def _event(number: int, content: bytes) -> jobs.JobEvent:
    event = jobs.JobEvent.FromString(content)
    event.number = number
    return event
