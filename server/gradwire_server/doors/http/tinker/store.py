"""The door's own records beside the core's runs: sessions, models, samplers, and clients' data on checkpoints.

The records are in memory, and in ``tinker.db`` of the state folder before they are acknowledged. Operations that came
before an earlier number did are kept there too, until the core has journaled them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

from gradwire_proto.v1 import training_pb2 as pb
from pydantic import AfterValidator, BaseModel, Field

from gradwire_server.access.signing import URL_SECRET, UrlSecret
from gradwire_server.doors.http.errors import in_public_names
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.errors import ServiceError, limit_exceeded
from gradwire_server.journal.schema import WAL_BYTES, give_back_space

FILE = "tinker.db"
MAX_TTL_S = 10 * 365 * 86_400
MAX_METADATA_CHARS = 16_384
MAX_NAME_CHARS = 4096


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(metadata)) > MAX_METADATA_CHARS:
        raise ValueError(f"user_metadata has more than {MAX_METADATA_CHARS} characters as JSON")
    return metadata


Metadata = Annotated[dict[str, Any], AfterValidator(_small)]
"""A client's own data on a session, a model or a checkpoint."""
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
"""An id, a path or the name of a model, as a client gives it."""
_TABLES = """
CREATE TABLE IF NOT EXISTS records (kind TEXT NOT NULL, key TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS early (model_id TEXT NOT NULL, seq INTEGER NOT NULL, operation BLOB NOT NULL,
    PRIMARY KEY (model_id, seq));
"""


class OwnedRecord(BaseModel):
    """The fields of every record. Times are Unix seconds.

    Attributes:
        owner: Name of the key that made it.
    """

    owner: str
    created_at: float = Field(default_factory=time.time)


class SessionRecord(OwnedRecord):
    """A session of a client.

    Attributes:
        ended: Whether the client has said that it is finished.
        finish_reason: Why: ``"success"``, ``"errored"`` or ``"interrupted"``.
        project_id, display_name: The client's labels; a project has no other effect here.
    """

    session_id: str
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    ended: bool = False
    finish_reason: str = "success"
    project_id: str = ""
    display_name: str = ""


class ModelRecord(OwnedRecord):
    """A model that is trained: a run of the core.

    Attributes:
        run_id: The run; empty until it is made.
        base_model, rank, alpha, seed, train_attn, train_mlp, train_unembed: The settings of a new model.
        path: The checkpoint that it starts from; empty for a new model.
        optimizer: Whether that one takes the optimizer's state too.
        error: Why it could not be made, as a serialized error in hex; empty otherwise.
        failure_seen: Number of the newest failed operation whose failure was delivered.
    """

    model_id: str
    session_id: str
    run_id: str = ""
    base_model: str = ""
    rank: int = 0
    alpha: float = 0.0
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    path: str = ""
    optimizer: bool = False
    user_metadata: dict[str, Any] = {}
    error: str = ""
    failure_seen: int = 0
    used_at: float = Field(default_factory=time.time)


class SamplerRecord(OwnedRecord):
    """A sampler.

    Attributes:
        base_model: The model that it samples from; for a checkpoint, the one below it.
        model_path: The path that the client gave; empty for a base model and for an unnamed snapshot.
        source: The core's name of the weights: a model's name, or ``RUN_ID/NAME``.
        snapshot: Whether the source is an unnamed snapshot, which goes with the sampler.
        inflight: Whether it samples from newer snapshots of this kind of its model once there are some.
    """

    sampler_id: str
    session_id: str
    base_model: str = ""
    model_path: str = ""
    source: str = ""
    snapshot: bool = False
    inflight: bool = False


class SavedRecord(OwnedRecord):
    """A client's settings for a checkpoint when it asks for it, or for exported weights.

    Attributes:
        expires_at: When it is deleted; None for never.
        seq: Number of the operation that writes it. A record of a checkpoint is of the one that this operation wrote,
            and of no other with its path.
        size_bytes: Bytes of exported weights, once they are written.
        recipients: The age recipients to whom exported weights are encrypted.
    """

    path: str
    expires_at: float | None = None
    user_metadata: dict[str, Any] = {}
    seq: int = 0
    size_bytes: int | None = None
    recipients: list[str] = []

    @property
    def key(self) -> str:
        """The path; of a checkpoint, which can be overwritten, with the operation's number."""
        return self.path if "/external_weights/" in self.path else f"{self.path}@{self.seq}"

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= time.time()


class WidthsRecord(OwnedRecord):
    """The number of targets at each position of each datum of one operation whose data differ in it."""

    request_id: str
    widths: list[int]


class AuditRecord(OwnedRecord):
    """Something that was done with a checkpoint. ``number`` counts them."""

    number: int
    event: str
    path: str
    details: dict[str, Any] = {}


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _checked(row: str) -> str:
    """A record's JSON without the checksum behind it, which earlier versions did not write.

    Raises:
        ValueError: It does not match.
    """
    text, end, checksum = row.rpartition("}")
    if not end or (checksum and checksum != _checksum(text + end)):
        raise ValueError(f"the checksum of {row[:80]!r} does not match")
    return text + end


R = TypeVar("R", bound=OwnedRecord)
T = TypeVar("T")


class Table(dict[str, R]):
    """The records of one kind by key; change them through :class:`TinkerStore`."""

    def __init__(self, kind: str, model: type[R], key: Callable[[R], str]) -> None:
        super().__init__()
        self.kind, self.model, self.key = kind, model, key


class TinkerStore:
    """The records, and the early operations.

    Args:
        state_dir: Folder of ``tinker.db``.
        key_records: Maximum sessions, models and samplers of a key.

    Attributes:
        session_used_at: Unix time at which a client last said that its session goes on, since the server started.
    """

    def __init__(self, state_dir: Path, key_records: int = 1 << 62) -> None:
        self._key_records = key_records
        self._counts: Counter[str] = Counter()
        self._opened_at, self._audited = time.time(), 0
        self.session_used_at: dict[str, float] = {}
        self.sessions = Table("session", SessionRecord, lambda record: record.session_id)
        self.models = Table("model", ModelRecord, lambda record: record.model_id)
        self.samplers = Table("sampler", SamplerRecord, lambda record: record.sampler_id)
        self.saved = Table("saved", SavedRecord, lambda record: record.key)
        self.widths = Table("widths", WidthsRecord, lambda record: record.request_id)
        self.audit = Table("audit", AuditRecord, lambda record: f"{record.number:015d}")
        self.url_secret = UrlSecret(state_dir)
        self.models_by_run: dict[str, ModelRecord] = {}
        self._path = state_dir / FILE
        self._thread = ThreadPoolExecutor(1, "gradwire-tinker-store")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Read every record, and make what a new folder lacks.

        Raises:
            SystemExit: The file is damaged, or it is missing though the folder had one.
        """
        gone = "sessions, samplers and what clients said of models and checkpoints are gone then, and the runs stay"
        # The secret is made after the file.
        if await self._run(lambda: not self._path.exists() and self.url_secret.exists):
            raise SystemExit(
                f"gradwire: {self._path} is missing, and {URL_SECRET} beside it shows that there was one; restore a "
                f"backup, or move {URL_SECRET} away as well: {gone}"
            )

        def run() -> list[tuple[str, str]]:
            self._connection = connection = sqlite3.connect(self._path, check_same_thread=False)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(_TABLES)
            with connection:  # the secret of URLs, which an earlier version kept here
                connection.execute("DELETE FROM records WHERE kind = 'secret'")
            assert self.url_secret.value  # is made here if there is none, and not on the event loop
            return connection.execute("SELECT kind, record FROM records").fetchall()

        tables: dict[str, Table[Any]] = {table.kind: table for table in self._tables()}
        try:
            for kind, text in await self._run(run):
                record = tables[kind].model.model_validate_json(_checked(text))
                tables[kind][tables[kind].key(record)] = record
        except (sqlite3.DatabaseError, KeyError, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError):  # it is locked, or the disk is full
                raise
            raise SystemExit(
                f"gradwire: {self._path} is damaged ({error}); restore a backup, or move it and {URL_SECRET} away: "
                f"{gone}"
            ) from error
        self._counts.update(record.owner for table in self._counted() for record in table.values())
        self.models_by_run.update((model.run_id, model) for model in self.models.values() if model.run_id)

    def next_audit_number(self) -> int:
        """The number of the next entry of the audit log."""
        self._audited = max(self._audited, *(each.number for each in [*self.audit.values()][-1:]), 0) + 1
        return self._audited

    async def close(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._run(connection.close)
        self._thread.shutdown()

    async def put(self, table: Table[R], record: R) -> None:
        """Add or change a record; durable when this returns.

        Raises:
            ServiceError: LIMIT_EXCEEDED if the key has too many; STORAGE_FULL.
        """
        key, text = table.key(record), record.model_dump_json()
        counts = key not in table and any(table is each for each in self._counted())
        if counts and self._counts[record.owner] >= self._key_records:
            what = f"the key's {self._counts[record.owner]:,} sessions, models and samplers"
            raise limit_exceeded(what, "key_records", self._key_records, "session_id")
        self._counts[record.owner] += counts
        try:
            row = (table.kind, key, text + _checksum(text))
            await self._execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)
        except ServiceError:
            self._counts[record.owner] -= counts
            raise
        table[key] = record
        if isinstance(record, ModelRecord) and record.run_id:
            self.models_by_run[record.run_id] = record

    async def delete(self, table: Table[R], *keys: str) -> None:
        """Delete those of these records that are there."""
        deleted = [(table.kind, key) for key in keys if key in table]
        for _, key in deleted:
            record = table.pop(key)
            if any(table is each for each in self._counted()):
                self._counts[record.owner] -= 1
            if isinstance(record, ModelRecord):
                self.models_by_run.pop(record.run_id, None)
            if isinstance(record, SessionRecord):
                self.session_used_at.pop(key, None)
        if deleted:
            await self._execute("DELETE FROM records WHERE kind = ? AND key = ?", *deleted)

    def in_its_names(self, text: str) -> str:
        """A text of the core's with models and their checkpoints by the names that clients know."""

        def public(path: str) -> str:
            run_id, _, name = path.partition("/")
            if (model := self.models_by_run.get(run_id)) is None:
                return "another model" + (f" ({name})" if name else "")
            return str(TinkerPath.stored(model.model_id, name) or model.model_id)

        return in_public_names(text, public)

    def used_at(self, session: SessionRecord) -> float:
        """Unix time at which a session was last used; not before the server's start, which clients may have awaited."""
        return self.session_used_at.get(session.session_id, max(session.created_at, self._opened_at))

    async def give_back_space(self) -> None:
        """Shorten the file by some of what deletions have left."""

        def run() -> None:
            assert self._connection is not None
            with self._connection:
                self._connection.execute("BEGIN")
                give_back_space(self._connection)

        await self._run(run)

    async def keep_early(self, model_id: str, seq: int, operation: bytes) -> None:
        """Keep an operation that waits for an earlier number."""
        await self._execute("INSERT OR REPLACE INTO early VALUES (?, ?, ?)", (model_id, seq, operation))

    async def drop_early(self, model_id: str, seq: int) -> None:
        """Drop one that the core has journaled."""
        await self._execute("DELETE FROM early WHERE model_id = ? AND seq = ?", (model_id, seq))

    async def early(self) -> list[tuple[str, int, bytes]]:
        """The kept operations: model, number and content, in order."""

        def run() -> list[tuple[str, int, bytes]]:
            assert self._connection is not None
            query = "SELECT model_id, seq, operation FROM early ORDER BY model_id, seq"
            return self._connection.execute(query).fetchall()

        return await self._run(run)

    def _counted(self) -> tuple[Table[Any], ...]:
        return self.sessions, self.models, self.samplers

    def _tables(self) -> Iterator[Table[Any]]:
        yield from (
            self.sessions,
            self.models,
            self.samplers,
            self.saved,
            self.widths,
            self.audit,
        )

    async def drop_early_of(self, model_id: str) -> None:
        """Drop those of a model that is gone."""
        await self._execute("DELETE FROM early WHERE model_id = ?", (model_id,))

    async def _execute(self, sql: str, *rows: tuple[Any, ...]) -> None:
        def run() -> None:
            assert self._connection is not None
            with self._connection:
                self._connection.executemany(sql, rows)

        try:
            await self._run(run)
        except sqlite3.OperationalError as error:
            message = f"the server could not write {FILE}: {error}; try again"
            raise ServiceError(pb.ERROR_CODE_STORAGE_FULL, message) from error

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
