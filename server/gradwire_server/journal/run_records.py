"""The records of all runs, in memory and in the database."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.config import TRAINED_BYTES
from gradwire_server.errors import ServiceError, invalid, unknown_run
from gradwire_server.journal import history
from gradwire_server.journal.database import Database
from gradwire_server.journal.run_files import RUN_FILE, described_runs, write_description
from gradwire_server.journal.run_row import RunRecord, insert, read_rows
from gradwire_server.journal.same_state import note_facts
from gradwire_server.journal.schema import RUN
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import Store, StoreError, run_owner

log = logging.getLogger(__name__)


class RunRecords:
    """Every run of a state folder, in memory and in the database."""

    def __init__(self, store: Database, state_dir: Path, max_runs: int, folders: Store | None = None) -> None:
        self._store, self._folder, self._max_runs = store, state_dir / "runs", max_runs
        self._saved = folders or FolderStore(state_dir)
        self._records: dict[str, RunRecord] = {}
        self._by_key: dict[tuple[str, str], RunRecord] = {}
        self._owned: Counter[str] = Counter()
        self._whole: dict[str, RunRecord] = {}  # runs that train all weights
        self._describing: dict[str, asyncio.Lock] = {}

    async def load(self) -> list[RunRecord]:
        """Load the runs; delete those whose creation did not finish, and skip those whose row is damaged."""
        unfinished = f"DELETE FROM runs WHERE ready = 0 AND digest = {RUN} RETURNING run_id"
        for (run_id,) in await self._store.write(lambda connection: connection.execute(unfinished).fetchall()):
            await self._saved.in_thread(self._delete_folders, run_id)
        for record in await self._store.read(read_rows):
            self._add(record)
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

        async def write() -> None:
            async with self._describing.setdefault(record.run_id, asyncio.Lock()):
                if record.run_id in self._records:
                    await asyncio.to_thread(self._describe, record)

        # To the end also if the caller leaves: a thread cannot be stopped, and the next one would write beside it.
        await asyncio.shield(asyncio.create_task(write()))

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

    def held_bytes(self, owner: str, among: Container[str]) -> int:
        """Memory that runs of a key hold also while they are idle: weights, gradients and moments in float32.

        LoRA runs hold none, because they leave the device (see ``gradwire_server.engine.state.residency``).
        """
        mine = (record for record in self._whole.values() if record.owner == owner and record.run_id in among)
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

    def by_model(self) -> Counter[str]:
        """Number of runs on each base model."""
        return Counter(record.config.base_model for record in self._records.values())

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
                raise invalid("unknown page_token; list again", "page_token")
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
        await self._store.write(lambda connection: insert(connection, record))

    async def finish(
        self, record: RunRecord, num_trainable_parameters: int, step: int, computed_with: Mapping[str, str]
    ) -> None:
        """Store a run as created, with what it is computed with; it is durable and visible from then on.

        The file that describes it follows its row, because a file without a row would look like a database from before
        the run. If a crash comes between them, the next start writes the file.
        """
        record.num_trainable_parameters, record.step = num_trainable_parameters, step

        def work(connection: sqlite3.Connection) -> None:
            insert(connection, record, ready=True)
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
            self._store.noted = False  # the row that had the commit's number may be gone

        await self._store.write(work)
        await self._saved.in_thread(self._delete_folders, record.run_id)

    def _delete_folders(self, run_id: str) -> None:
        """Delete a run's files; where the store fails, what it has of them stays there."""
        shutil.rmtree(self._folder / run_id, ignore_errors=True)
        try:
            self._saved.delete_all(run_owner(run_id))
        except StoreError as error:
            log.error("%s was deleted and is still in the store (`gradwire repair` finds it): %s", run_id, error)
