"""Checkpoints of runs: their rows, their folders, and the operations that read them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.durable_files import make_folder, sync, sync_tree
from gradwire_server.errors import ServiceError, unknown_checkpoint
from gradwire_server.journal import history
from gradwire_server.journal.database import Database
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.operation_kinds import kind_of, loss_call, training_call

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ORIGIN = "fork-origin"
"""Folder name, among a fork's checkpoints, of its copy of the checkpoint from which it started."""
AUTOMATIC = "auto-"
"""Name prefix of automatic checkpoints."""
SNAPSHOT = "snapshot."
"""Name prefix of weights that a door keeps for a sampler and deletes itself; they are counted apart."""


class CheckpointRecords:
    """The checkpoints of every run of a state folder."""

    def __init__(self, runs: RunRecords, store: Database, state_dir: Path) -> None:
        self._runs, self._store, self._folder = runs, store, state_dir / "runs"

    def get(self, path: str, caller: Caller, *, write: bool = False) -> tuple[RunRecord, pb.Checkpoint]:
        """Return the run and the checkpoint of a path ``"RUN_ID/NAME"``.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, also for one that is not public of a run that the caller may not read;
                PERMISSION_DENIED as for :meth:`.RunRecords.get`.
        """
        run_id, _, name = path.partition("/")
        record = self._runs.find(run_id)
        checkpoint = None if record is None else record.checkpoints.get(name)
        if record is None or checkpoint is None or not (record.readable(caller) or checkpoint.public):
            raise unknown_checkpoint(path)
        if write:
            record.check_writable(caller)
        return record, checkpoint

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
        """Record a checkpoint whose folder is complete."""
        query, values = "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (
            record.run_id, checkpoint.name, checkpoint.SerializeToString(),
        )  # fmt: skip
        await self._store.write(lambda connection: connection.execute(query, values).close())
        record.checkpoints[checkpoint.name] = checkpoint

    async def copy(self, record: RunRecord, saved: pb.Checkpoint, name: str) -> None:
        """Copy a checkpoint of a run to another name, as the server's own. Files are linked where possible."""
        source, target = (self.folder(record.run_id, "checkpoints", each) for each in (saved.name, name))

        def run() -> None:
            shutil.rmtree(target, ignore_errors=True)  # of an earlier copy that a crash has cut off
            shutil.copytree(source, target, copy_function=_link_or_copy)
            sync_tree(target)
            sync(target.parent)

        await asyncio.to_thread(run)
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
        await asyncio.to_thread(shutil.rmtree, self.folder(record.run_id, "checkpoints", name), ignore_errors=True)

    def folder(self, run_id: str, kind: str, name: str) -> Path:
        """The folder of a checkpoint or an export.

        Args:
            kind: ``"checkpoints"`` or ``"exports"``.

        Raises:
            ServiceError: INVALID_ARGUMENT for an invalid name, which could lead out of the folder.
        """
        if not NAME.fullmatch(run_id) or not NAME.fullmatch(name):
            raise ServiceError(
                pb.ERROR_CODE_INVALID_ARGUMENT, f"{name[:100]!r} is not a name", field="name", rule=NAME.pattern
            )
        return self._folder / run_id / kind / name

    async def adopt(self, record: RunRecord, folder: Path) -> None:
        """Copy the checkpoint from which a run starts, and for a fork the source's record up to it, into its own.

        Files are linked where possible. The fork stays restorable when the original is deleted.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT if the original was deleted meanwhile.
        """
        target = self.folder(record.run_id, "checkpoints", ORIGIN)

        def copy() -> None:
            make_folder(target.parent)
            try:
                shutil.copytree(folder, target, copy_function=_link_or_copy)
            except OSError as error:
                if folder.exists():
                    raise
                deleted = record.forked_from or record.config.from_upload
                raise unknown_checkpoint(deleted) from error
            sync_tree(target)
            sync(target.parent)

        await asyncio.to_thread(copy)
        if record.config.from_upload:
            return
        source, _, name = record.forked_from.partition("/")
        original = self._runs.find(source)
        if original is None or name not in original.checkpoints:
            raise unknown_checkpoint(record.forked_from)  # deleted meanwhile
        seq = original.checkpoints[name].seq
        await self._store.write(lambda connection: history.copy(connection, source, seq, record.run_id))

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
        found: tuple[str, str, int] | None = await self._store.read(
            lambda connection: connection.execute(query, values).fetchone()
        )
        return found


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without links
        shutil.copy2(source, target)


def named_checkpoints(operation: pb.Operation) -> list[tuple[str, str]]:
    """The checkpoints ``"RUN_ID/NAME"`` that an operation names, as pairs of argument and path.

    Raises:
        ValueError, RecursionError: The arguments of a loss are not JSON.
    """
    found: list[tuple[str, object]] = []
    if kind_of(operation).loads_checkpoint and "/" in operation.load_checkpoint.checkpoint:
        return [("checkpoint", operation.load_checkpoint.checkpoint)]
    call = loss_call(operation)
    if call is not None:
        arguments = json.loads(call.loss_kwargs_json or "{}")
        found = [("model", call.model), *(arguments.items() if isinstance(arguments, dict) else ())]
    return [(name, path) for name, path in found if isinstance(path, str) and path.startswith("run-") and "/" in path]


def uses(operation: pb.Operation) -> list[str]:
    """The checkpoints that a replay of an operation reads."""
    if kind_of(operation).loads_checkpoint:
        return [operation.load_checkpoint.checkpoint]
    call = training_call(operation)
    if call is not None and "/" in call.loss_kwargs_json:
        try:
            arguments = json.loads(call.loss_kwargs_json)
        except ValueError:
            return []
        values = arguments.values() if isinstance(arguments, dict) else ()
        return sorted({value for value in values if isinstance(value, str) and value.count("/") == 1})
    return []
