"""The rows of rollout sessions and of their turns."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import sessions_pb2 as sessions

from gradwire_server.journal.database import Database

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredSession:
    """A session with what is not told of it.

    Attributes:
        session: It, with the counts of its turns.
        key_digest: SHA-256 of its key.
        idempotency_key, request: Tell a repeated creation from another.
    """

    session: sessions.RolloutSession
    key_digest: str
    idempotency_key: str
    request: bytes


class SessionRecords:
    """Reads and writes the rows; a write is on disk when its future resolves."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> list[StoredSession]:
        """Read every session, oldest first."""
        query = (
            "SELECT session, key_digest, idempotency_key, request, count(number), max(at), sum(prompt_tokens),"
            " sum(sampled_tokens), sum(length(turn)) FROM sessions LEFT JOIN session_turns USING (session_id)"
            " GROUP BY sessions.session_id ORDER BY created_at, sessions.session_id"
        )
        rows = await self._database.read(lambda connection: connection.execute(query).fetchall())
        found = []
        for raw, key_digest, idempotency_key, request, turns, at, prompts, sampled, size in rows:
            try:
                session = sessions.RolloutSession.FromString(raw)
            except DecodeError:
                log.error("a rollout session's row is damaged and left out")
                continue
            session.num_turns, session.used_at, session.size_bytes = turns, at or 0.0, size or 0
            session.num_prompt_tokens, session.num_sampled_tokens = prompts or 0, sampled or 0
            found.append(StoredSession(session, key_digest, idempotency_key, request))
        return found

    def insert(self, stored: StoredSession) -> asyncio.Future[None]:
        """Add a session."""
        session = stored.session
        row = (
            session.session_id, session.owner, session.created_at, stored.idempotency_key, stored.key_digest,
            stored.request, session.SerializeToString(),
        )  # fmt: skip

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        return self._database.write(work)

    def update(self, session: sessions.RolloutSession, key_digest: str = "") -> asyncio.Future[None]:
        """Replace what a session's row says of it, and its key if one is given."""
        row = session.SerializeToString(), key_digest, key_digest, session.session_id

        def work(connection: sqlite3.Connection) -> None:
            change = "UPDATE sessions SET session = ?, key_digest = iif(? = '', key_digest, ?) WHERE session_id = ?"
            connection.execute(change, row)

        return self._database.write(work)

    def add_turns(self, session_id: str, turns: Iterable[journal_pb2.StoredTurn]) -> asyncio.Future[int]:
        """Add turns; the future's value is their size in bytes."""
        rows, size = [], 0
        for stored in turns:
            turn, raw = stored.turn, stored.SerializeToString()
            at, tokens = turn.started_at + turn.seconds, len(turn.response_ids)
            rows.append((session_id, turn.number, at, turn.prompt_tokens, tokens, _digest(raw), raw))
            size += len(raw)

        def work(connection: sqlite3.Connection) -> int:
            connection.executemany("INSERT INTO session_turns VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            return size

        return self._database.write(work)

    async def turns(self, session_id: str) -> list[journal_pb2.StoredTurn]:
        """Read a session's turns, in order; those from the first that is damaged on are left out."""
        query = "SELECT digest, turn FROM session_turns WHERE session_id = ? ORDER BY number"
        rows = await self._database.read(lambda connection: connection.execute(query, (session_id,)).fetchall())
        found = list[journal_pb2.StoredTurn]()
        for digest, raw in rows:
            if digest != _digest(raw):
                log.error("turn %d of %s is damaged; it and those behind it are left out", len(found), session_id)
                break
            found.append(journal_pb2.StoredTurn.FromString(raw))
        return found

    def delete(self, session_ids: Iterable[str]) -> asyncio.Future[None]:
        """Delete sessions with their turns."""
        rows = [(session_id,) for session_id in session_ids]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM sessions WHERE session_id = ?", rows)
            connection.executemany("DELETE FROM session_turns WHERE session_id = ?", rows)

        return self._database.write(work)


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()
