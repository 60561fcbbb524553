"""Checkpoints of runs: their rows, their places in the store, and the operations that read them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.checkpoint_files import NAME, ORIGIN, SNAPSHOT, DamagedCheckpoint, check_files, write_sums
from gradwire_server.errors import ServiceError, unknown_checkpoint
from gradwire_server.journal import history
from gradwire_server.journal.database import Database
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.operation_kinds import kind_of, loss_call
from gradwire_server.stores.store import CHECKPOINTS, Place, Store, StoreError, StoreFull, run_owner, saved_place

log = logging.getLogger(__name__)


class CheckpointRecords:
    """The checkpoints of every run of a state folder."""

    def __init__(self, runs: RunRecords, store: Database, folders: Store) -> None:
        self._runs, self._store, self.folders = runs, store, folders

    def get(self, path: str, caller: Caller, *, write: bool = False) -> tuple[RunRecord, pb.Checkpoint]:
        """Return the run and the checkpoint of a path ``"RUN_ID/NAME"``.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, also for one that is not public of a run that the caller may not read;
                PERMISSION_DENIED as for :meth:`.RunRecords.get`.
        """
        run_id, _, name = path.partition("/")
        record = self._runs.find(run_id)
        checkpoint = None if record is None else record.checkpoints.get(name)
        if record is None or not (record.readable(caller) or (checkpoint is not None and checkpoint.public)):
            raise unknown_checkpoint(path)
        if checkpoint is None:
            raise unknown_checkpoint(path, [each for each in record.checkpoints if not each.startswith(SNAPSHOT)])
        if write:
            record.check_writable(caller)
        return record, checkpoint

    def holds(self, record: RunRecord, checkpoint: pb.Checkpoint) -> bool:
        """Whether a checkpoint is still there: neither deleted, with its run or alone, nor replaced by a later save."""
        saved = record.checkpoints.get(checkpoint.name)
        return self._runs.find(record.run_id) is record and saved is not None and saved.seq == checkpoint.seq

    def check_uses(self, record: RunRecord, operation: pb.Operation) -> pb.Error | None:
        """Return an error if an operation names a checkpoint that its own run's owner may not read.

        The error is the same as for a run that does not exist. Whether the checkpoint itself exists is checked by the
        engine when it executes the operation.
        """
        owner = Caller(record.owner)
        for name, path in named_checkpoints(operation):
            run_id, _, checkpoint = path.partition("/")
            other = self._runs.find(run_id)
            public = other is not None and checkpoint in other.checkpoints and other.checkpoints[checkpoint].public
            if other is None or not other.ready or not (other.readable(owner) or public):
                error = unknown_checkpoint(path).error
                error.field = name
                return error
        return None

    async def add(self, record: RunRecord, checkpoint: pb.Checkpoint) -> None:
        """Record a checkpoint that is in the store."""
        query, values = "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (
            record.run_id, checkpoint.name, checkpoint.SerializeToString(),
        )  # fmt: skip
        await self._store.write(lambda connection: connection.execute(query, values).close())
        record.checkpoints[checkpoint.name] = checkpoint

    async def copy(self, record: RunRecord, saved: pb.Checkpoint, name: str) -> None:
        """Copy a checkpoint of a run to another name, as the server's own."""
        source, target = (self.place(record.run_id, CHECKPOINTS, each) for each in (saved.name, name))
        try:
            await self.folders.in_thread(self.folders.copy, source, target)
        except FileNotFoundError:
            raise unknown_checkpoint(saved.path) from None
        except StoreError as error:
            raise store_failed(error) from error
        copied = pb.Checkpoint()
        copied.CopyFrom(saved)
        copied.path, copied.name, copied.note, copied.public = f"{record.run_id}/{name}", name, "automatic", False
        await self.add(record, copied)

    async def delete(self, record: RunRecord, name: str) -> None:
        """Delete a checkpoint: first its row, so that no recovery reads a half-deleted folder, then its files.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT.
        """
        if record.checkpoints.pop(name, None) is None:
            raise unknown_checkpoint(f"{record.run_id}/{name}")  # another call has deleted it meanwhile
        query, values = "DELETE FROM checkpoints WHERE run_id = ? AND name = ?", (record.run_id, name)
        await self._store.write(lambda connection: connection.execute(query, values).close())
        await self.delete_folder(self.place(record.run_id, CHECKPOINTS, name))

    async def delete_folder(self, place: Place) -> None:
        """Delete a folder that nothing refers to any more; where the store fails, it stays there."""
        try:
            await self.folders.in_thread(self.folders.delete, place)
        except StoreError as error:
            log.error("%s was deleted and is still in the store (`gradwire repair` finds it): %s", place, error)

    async def fence(self, run_id: str) -> int:
        """Number for the engine that gets a run now; those that held it before can no longer write.

        Raises:
            ServiceError: The store cannot be used.
        """
        if not self.folders.fenced:
            return 0
        try:
            return await self.folders.in_thread(self.folders.fence, run_owner(run_id))
        except StoreError as error:
            raise store_failed(error) from error

    @asynccontextmanager
    async def reading(self, place: Place, *, named: str = "", check: str | None = None) -> AsyncGenerator[Path]:
        """Provide the folder of a checkpoint or export, to be read only.

        Args:
            named: The reader's name for it, in errors.
            check: The file whose bytes are compared with its checksum first; "": of all files.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT; CHECKPOINT_CORRUPT; or the store cannot be used.
        """
        reading = self.folders.reading(place)
        try:
            folder = await self.folders.in_thread(reading.__enter__)
        except FileNotFoundError:
            raise unknown_checkpoint(named or str(place)) from None
        except DamagedCheckpoint as error:
            raise _damaged(named or str(place), error) from error
        except StoreError as error:
            raise store_failed(error) from error
        try:
            try:
                if check is not None:
                    await self.folders.in_thread(check_files, folder, place.name.partition("/")[0], check)
                yield folder
            finally:
                await self.folders.in_thread(reading.__exit__, None, None, None)
        except DamagedCheckpoint as error:
            raise _damaged(named or str(place), error) from error

    async def change(self, place: Place, write: Callable[[Path, Path], None]) -> None:
        """Replace a folder by what ``write`` writes into its second argument from its first."""

        def change() -> None:
            with self.folders.replacing(place) as new, self.folders.reading(place) as old:
                write(old, new)
                write_sums(new)

        try:
            await self.folders.in_thread(change)
        except FileNotFoundError:
            raise unknown_checkpoint(str(place)) from None
        except StoreError as error:
            raise store_failed(error) from error

    def place(self, run_id: str, kind: str, name: str) -> Place:
        """The place of a checkpoint or an export.

        Args:
            kind: ``"checkpoints"`` or ``"exports"``.

        Raises:
            ServiceError: INVALID_ARGUMENT for an invalid name, which could lead elsewhere.
        """
        if not NAME.fullmatch(run_id) or not NAME.fullmatch(name):
            raise ServiceError(
                pb.ERROR_CODE_INVALID_ARGUMENT, f"{name[:100]!r} is not a name", field="name", rule=NAME.pattern
            )
        return saved_place(run_id, kind, name)

    async def adopt(self, record: RunRecord, source: Place) -> None:
        """Copy the checkpoint from which a run starts, and for a fork the source's record up to it, into its own.

        The fork stays restorable when the original is deleted.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT if the original was deleted meanwhile.
        """
        try:
            await self.folders.in_thread(self.folders.copy, source, self.place(record.run_id, CHECKPOINTS, ORIGIN))
        except FileNotFoundError as error:
            raise unknown_checkpoint(record.forked_from or record.config.from_upload) from error
        except StoreError as error:
            raise store_failed(error) from error
        if record.config.from_upload:
            return
        run_id, _, name = record.forked_from.partition("/")
        original = self._runs.find(run_id)
        if original is None or name not in original.checkpoints:
            raise unknown_checkpoint(record.forked_from)  # deleted meanwhile
        seq = original.checkpoints[name].seq
        await self._store.write(lambda connection: history.copy(connection, run_id, seq, record.run_id))

    async def user_of(self, run_id: str, name: str = "") -> tuple[str, str, int] | None:
        """Find an operation whose replay would read a checkpoint of a run.

        Args:
            run_id: The run that owns the checkpoint.
            name: The checkpoint; empty for any checkpoint of the run, read by an operation of another run.

        Returns:
            Checkpoint, run id and number of the newest such operation; None if there is none.
        """
        condition = "checkpoint = ?" if name else "checkpoint LIKE ? AND uses.run_id != ?"
        values = (f"{run_id}/{name}",) if name else (f"{run_id}/%", run_id)
        query = (
            "SELECT checkpoint, uses.run_id, seq FROM uses JOIN operations USING (run_id, seq)"
            f" WHERE {condition} AND status IN (?, ?) ORDER BY seq DESC LIMIT 1"
        )
        values = (*values, pb.STATUS_UNSPECIFIED, pb.STATUS_SUCCEEDED)
        user: tuple[str, str, int] | None = await self._store.read(
            lambda connection: connection.execute(query, values).fetchone()
        )
        return user


def _damaged(named: str, error: DamagedCheckpoint) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_CHECKPOINT_CORRUPT, f"{named} is damaged: {error}")


def store_failed(error: StoreError) -> ServiceError:
    """The error for a caller whose request the store did not carry out."""
    code = pb.ERROR_CODE_STORAGE_FULL if isinstance(error, StoreFull) else pb.ERROR_CODE_INTERNAL
    return ServiceError(code, str(error))


def named_checkpoints(operation: pb.Operation) -> list[tuple[str, str]]:
    """The checkpoints ``"RUN_ID/NAME"`` that an operation names, as pairs of argument and path.

    Raises:
        ValueError, RecursionError: The arguments of a loss are not JSON.
    """
    named: list[tuple[str, object]] = []
    if kind_of(operation).loads_checkpoint and "/" in operation.load_checkpoint.checkpoint:
        return [("checkpoint", operation.load_checkpoint.checkpoint)]
    call = loss_call(operation)
    if call is not None:
        arguments = json.loads(call.loss_kwargs_json or "{}")
        named = [("model", call.model), *(arguments.items() if isinstance(arguments, dict) else ())]
    return [(name, path) for name, path in named if isinstance(path, str) and path.startswith("run-") and "/" in path]
