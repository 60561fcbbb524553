"""Records of runs: owner, writer, origin, progress, readers and checkpoints."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradwire_proto.v1 import engine_pb2, journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.config import TRAINED_BYTES
from gradwire_server.errors import ServiceError, unknown_run
from gradwire_server.journal import history
from gradwire_server.journal.database import Database
from gradwire_server.journal.run_files import RUN_FILE, described_runs, write_description
from gradwire_server.journal.same_state import note_facts
from gradwire_server.journal.schema import RUN

log = logging.getLogger(__name__)


@dataclass
class RunRecord:
    """A run as stored in its row, with its checkpoints and readers.

    Attributes:
        run_id: Id of the run.
        owner: Name of the key that owns it.
        config: Its settings.
        created_at: Unix time in seconds.
        origin: Request that creates the run in an engine in its first state.
        forked_from: Path of the checkpoint from which it was forked; empty if it was not.
        idempotency_key: Key of the request that created it.
        request: That request, serialized; tells whether a repeated key repeats the same request.
        ready: Whether its creation has finished.
        epoch: Epoch of the present writer; rises with every open and rewind.
        writer: Name of the present writer; empty for none.
        accepted_seq: Highest number in the journal.
        applied_seq: Every operation up to this number has a durable result.
        released_seq: Results up to this number are deleted.
        trimmed_seq: The journal starts after this number.
        step: Number of optimizer steps.
        failure_seq: Failed operation because of which later ones are aborted, unless their writer has seen the failure;
            0 for none.
        failure: Message of that failure.
        rewound_to_seq: Last number that the newest rewind kept.
        rewound_epoch: Epoch before the newest rewind.
        num_trainable_parameters: Number of parameters that its optimizer updates.
        num_tokens: Tokens processed since the server started; not stored.
        checkpoints: Its checkpoints by name.
        readers: Names of other keys that may read it.
        changes: What changed under it and was accepted, oldest first.
    """

    run_id: str
    owner: str
    config: pb.RunConfig
    created_at: float
    origin: engine_pb2.EngineCreateRun
    forked_from: str = ""
    idempotency_key: str = ""
    request: bytes = b""
    ready: bool = False
    epoch: int = 0
    writer: str = ""
    accepted_seq: int = 0
    applied_seq: int = 0
    released_seq: int = 0
    trimmed_seq: int = 0
    step: int = 0
    failure_seq: int = 0
    failure: str = ""
    rewound_to_seq: int = 0
    rewound_epoch: int = 0
    num_trainable_parameters: int = 0
    num_tokens: int = 0
    checkpoints: dict[str, pb.Checkpoint] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    changes: list[pb.RunChange] = field(default_factory=list)

    def writable(self, caller: Caller) -> bool:
        """Whether a caller may change the run."""
        return caller.role == "admin" or caller.name == self.owner

    def readable(self, caller: Caller) -> bool:
        """Whether a caller may read the run."""
        return self.writable(caller) or caller.name in self.readers

    def check_writable(self, caller: Caller) -> None:
        """Check that a caller, who may read the run, may also change it.

        Raises:
            ServiceError: PERMISSION_DENIED.
        """
        if not self.writable(caller):
            raise ServiceError(
                pb.ERROR_CODE_PERMISSION_DENIED,
                f"the run {self.run_id} is shared with this key to read; fork a checkpoint of it to go on from there",
                field="run_id",
            )

    def trim(self, up_to_seq: int) -> None:
        """Record that the journal starts after this number."""
        self.trimmed_seq = max(self.trimmed_seq, up_to_seq)

    @property
    def complete_checkpoints(self) -> list[pb.Checkpoint]:
        """The checkpoints from which the run could be restored."""
        return [saved for saved in self.checkpoints.values() if not saved.weights_only]

    @property
    def newest_checkpoint(self) -> pb.Checkpoint | None:
        """The one of those that contains the most operations; None if there is none."""
        return max(self.complete_checkpoints, key=lambda checkpoint: checkpoint.seq, default=None)

    def description(self) -> journal_pb2.RunDescription:
        """What of the row does not follow from the run's operations."""
        return journal_pb2.RunDescription(
            run_id=self.run_id,
            owner=self.owner,
            config=self.config,
            created_at=self.created_at,
            origin=self.origin,
            forked_from=self.forked_from,
            idempotency_key=self.idempotency_key,
            request=self.request,
            num_trainable_parameters=self.num_trainable_parameters,
            readers=sorted(self.readers),
        )

    def to_proto(self) -> pb.Run:
        """The run as clients see it."""
        newest = self.newest_checkpoint
        return pb.Run(
            run_id=self.run_id,
            config=self.config,
            epoch=self.epoch,
            accepted_seq=self.accepted_seq,
            applied_seq=self.applied_seq,
            released_seq=self.released_seq,
            step=self.step,
            latest_checkpoint=newest.path if newest else "",
            created_at=self.created_at,
            rewound_to_seq=self.rewound_to_seq,
            num_trainable_parameters=self.num_trainable_parameters,
            num_tokens=self.num_tokens,
            forked_from=self.forked_from,
            owner=self.owner,
            readers=sorted(self.readers),
            changes=self.changes,
        )


_COLUMNS = (
    "run_id", "owner", "config", "created_at", "origin", "forked_from", "idempotency_key", "request", "ready", "epoch",
    "writer", "accepted_seq", "applied_seq", "released_seq", "trimmed_seq", "step", "failure_seq", "failure",
    "rewound_to_seq", "rewound_epoch", "num_trainable_parameters",
)  # fmt: skip


def new_run_id() -> str:
    """A random run id."""
    return "run-" + base64.b32encode(secrets.token_bytes(10)).decode().lower()


class RunRecords:
    """Every run of a state folder, in memory and in the database."""

    def __init__(self, store: Database, state_dir: Path, max_runs: int) -> None:
        self._store, self._folder, self._max_runs = store, state_dir / "runs", max_runs
        self._records: dict[str, RunRecord] = {}
        self._by_key: dict[tuple[str, str], RunRecord] = {}
        self._owned: Counter[str] = Counter()
        self._whole: dict[str, RunRecord] = {}  # runs that train all weights
        self._describing: dict[str, asyncio.Lock] = {}

    async def load(self) -> list[RunRecord]:
        """Load the runs; delete those whose creation did not finish, and skip those whose row is damaged."""
        unfinished = f"DELETE FROM runs WHERE ready = 0 AND digest = {RUN} RETURNING run_id"
        for (run_id,) in await self._store.write(lambda connection: connection.execute(unfinished).fetchall()):
            await asyncio.to_thread(shutil.rmtree, self._folder / run_id, ignore_errors=True)
        rows = await self._store.read(
            lambda connection: connection.execute(
                f"SELECT digest = {RUN}, {', '.join(_COLUMNS)} FROM runs ORDER BY created_at"
            ).fetchall()
        )
        for whole, *row in rows:
            if not whole:
                log.error("run %r is left out: its row in the database is not what was written", row[0])
                continue
            values = dict(zip(_COLUMNS, row, strict=True))
            values["config"] = pb.RunConfig.FromString(values["config"])
            values["origin"] = engine_pb2.EngineCreateRun.FromString(values["origin"])
            self._add(RunRecord(**values))
        saved = await self._store.read(
            lambda connection: connection.execute("SELECT run_id, name, checkpoint FROM checkpoints").fetchall()
        )
        for run_id, name, checkpoint in saved:
            if run_id in self._records:
                self._records[run_id].checkpoints[name] = pb.Checkpoint.FromString(checkpoint)
        shared = await self._store.read(
            lambda connection: connection.execute("SELECT run_id, reader FROM readers").fetchall()
        )
        for run_id, reader in shared:
            if run_id in self._records:
                self._records[run_id].readers.add(reader)
        changes = "SELECT run_id, seq, at, note FROM computed_with WHERE note != '' ORDER BY position"
        for run_id, seq, at, note in await self._store.read(lambda connection: connection.execute(changes).fetchall()):
            if run_id in self._records:
                self._records[run_id].changes.append(pb.RunChange(seq=seq, time=at, note=note))
        await asyncio.to_thread(self._describe_missing)
        return list(self._records.values())

    def _add(self, record: RunRecord) -> None:
        self._records[record.run_id] = record
        self._owned[record.owner] += 1
        if not record.config.HasField("lora"):
            self._whole[record.run_id] = record
        if record.idempotency_key:
            self._by_key[record.owner, record.idempotency_key] = record

    def _remove(self, record: RunRecord) -> None:
        if self._records.pop(record.run_id, None) is not None:
            self._owned[record.owner] -= 1
            self._whole.pop(record.run_id, None)
            self._by_key.pop((record.owner, record.idempotency_key), None)

    def _describe(self, record: RunRecord) -> None:
        """Write the file that describes a run."""
        write_description(self._folder / record.run_id, record.description())

    def _describe_missing(self) -> None:
        """Write the file of each run that has none: a crash came between its row and its file."""
        described = described_runs(self._folder)
        for record in self._records.values():
            if record.run_id not in described:
                self._describe(record)

    async def _describe_again(self, record: RunRecord) -> None:
        """Write the file that describes a run, after those that are being written; not of a run deleted meanwhile."""
        async with self._describing.setdefault(record.run_id, asyncio.Lock()):
            if record.run_id in self._records:
                await asyncio.to_thread(self._describe, record)

    def get(self, run_id: str, caller: Caller, *, write: bool = False) -> RunRecord:
        """Return a run that a caller may read, or with ``write``, change.

        Raises:
            ServiceError: UNKNOWN_RUN, also for a run that the caller may not read; PERMISSION_DENIED for one that the
                caller may only read.
        """
        record = self._records.get(run_id)
        if record is None or not record.ready or not record.readable(caller):
            raise unknown_run(run_id)
        if write:
            record.check_writable(caller)
        return record

    def find(self, run_id: str) -> RunRecord | None:
        """A run, one that is being created included; None if there is none."""
        return self._records.get(run_id)

    def owned(self, owner: str) -> int:
        """Number of runs that a key owns."""
        return self._owned[owner]

    def held_bytes(self, owner: str) -> int:
        """Memory that the runs of a key hold also while they are idle: weights, gradients and moments in float32.

        LoRA runs hold none, because they leave the device (see ``gradwire_server.engine.state.residency``).
        """
        mine = (record for record in self._whole.values() if record.owner == owner)
        return TRAINED_BYTES * sum(record.num_trainable_parameters for record in mine)

    async def share(self, record: RunRecord, reader: str, revoke: bool) -> None:
        """Allow another key to read a run, or revoke that; durable when it returns."""
        query = "DELETE FROM readers WHERE run_id = ? AND reader = ?"
        if not revoke:
            query = "INSERT OR IGNORE INTO readers VALUES (?, ?)"
        values = (record.run_id, reader)
        await self._store.write(lambda connection: connection.execute(query, values).close())
        (record.readers.discard if revoke else record.readers.add)(reader)
        await self._describe_again(record)

    @property
    def count(self) -> int:
        """Number of runs, those being created included."""
        return len(self._records)

    def by_key(self, owner: str, key: str) -> RunRecord | None:
        """The run that an idempotency key of an owner created or is creating; None if there is none."""
        return self._by_key.get((owner, key)) if key else None

    def page(self, caller: Caller, size: int, token: str) -> tuple[list[RunRecord], str]:
        """A page of the runs that a caller may read, oldest first, and the next page's token ("" at the end).

        Args:
            size: Runs per page, 1000 at most; 0 for 100.
            token: Token of the page; "" for the first.

        Raises:
            ServiceError: INVALID_ARGUMENT for an unknown token.
        """
        size = min(size or 100, 1000)
        mine = sorted(
            (record for record in self._records.values() if record.readable(caller) and record.ready),
            key=lambda record: (record.created_at, record.run_id),
        )
        start = 0
        if token:
            last = next((i for i, record in enumerate(mine) if record.run_id == token), None)
            if last is None:
                raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "unknown page_token; list again", field="page_token")
            start = last + 1
        page = mine[start : start + size]
        return page, page[-1].run_id if start + size < len(mine) else ""

    def reserve(self, record: RunRecord) -> None:
        """Add a run that is being created, in memory; it becomes visible with :meth:`finish`.

        Raises:
            ServiceError: LIMIT_EXCEEDED.
        """
        if len(self._records) >= self._max_runs:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"the server keeps {self._max_runs} runs already (--limit max_runs=N); delete one first",
                rule=f"max_runs = {self._max_runs}",
            )
        self._add(record)

    async def insert(self, record: RunRecord) -> None:
        """Store a reserved run as unfinished, for the next start to delete what its creation leaves in its folder."""
        await self._store.write(lambda connection: _insert(connection, record))

    async def finish(
        self, record: RunRecord, num_trainable_parameters: int, step: int, computed_with: Mapping[str, str]
    ) -> None:
        """Store a run as created, with what it is computed with; it is durable and visible from then on.

        The file that describes it follows its row, because a file without a row would look like a database from before
        the run. If a crash comes between them, the next start writes the file.
        """
        record.num_trainable_parameters, record.step = num_trainable_parameters, step

        def work(connection: sqlite3.Connection) -> None:
            _insert(connection, record, ready=True)
            if computed_with:
                note_facts(connection, record.run_id, 0, computed_with)

        await self._store.write(work)
        await self._describe_again(record)
        record.ready = True

    async def open(self, record: RunRecord, takeover: bool, writer: str) -> int:
        """Make a writer the run's only one and return its epoch; durable when it returns.

        Raises:
            ServiceError: RUN_BUSY if another writer holds the run and ``takeover`` is not set.
        """
        if record.writer and record.writer != writer and not takeover:
            raise ServiceError(
                pb.ERROR_CODE_RUN_BUSY,
                f"the run {record.run_id} is held by the writer {record.writer!r}; open it with takeover to fence it",
            )
        before = record.epoch, record.writer
        # Set the epoch before the write, so that the previous writer is refused from now on: everything that it has
        # written is then in the journal before this epoch.
        record.epoch, record.writer = epoch, _ = record.epoch + 1, writer
        values = (epoch, writer, record.run_id)
        query = "UPDATE runs SET epoch = ?, writer = ? WHERE run_id = ?"
        try:
            await self._store.write(lambda connection: connection.execute(query, values).close())
        except Exception:
            if record.epoch == epoch:  # undo, unless another writer has opened the run meanwhile
                record.epoch, record.writer = before
            raise
        return epoch

    async def delete(self, record: RunRecord) -> None:
        """Delete a run with its operations, results, checkpoints and files."""
        self._remove(record)
        # A description without a row would look like a database from before the run.
        async with self._describing.setdefault(record.run_id, asyncio.Lock()):
            await asyncio.to_thread((self._folder / record.run_id / RUN_FILE).unlink, missing_ok=True)
        self._describing.pop(record.run_id, None)

        def work(connection: sqlite3.Connection) -> None:
            for table in ("operations", "results", "uses", "readers", "checkpoints", "computed_with", "runs"):
                connection.execute(f"DELETE FROM {table} WHERE run_id = ?", (record.run_id,))
            history.delete(connection, record.run_id)

        await self._store.write(work)
        await asyncio.to_thread(shutil.rmtree, self._folder / record.run_id, ignore_errors=True)


def _insert(connection: sqlite3.Connection, record: RunRecord, ready: bool = False) -> None:
    values = {name: getattr(record, name) for name in _COLUMNS}
    values |= {"config": record.config.SerializeToString(), "origin": record.origin.SerializeToString(), "ready": ready}
    replaced = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
    connection.execute(
        f"INSERT INTO runs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
        f" ON CONFLICT (run_id) DO UPDATE SET {replaced}",
        tuple(values.values()),
    )


def new_record(owner: str, config: pb.RunConfig, key: str, request: bytes) -> RunRecord:
    """The record of a run that is still to be created."""
    run_id = new_run_id()
    origin = engine_pb2.EngineCreateRun(run_id=run_id, config=config)
    return RunRecord(run_id, owner, config, time.time(), origin, idempotency_key=key, request=request)
