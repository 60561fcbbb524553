"""Checkpoints and exported weights of the protocol, by their paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.store import SavedRecord, TinkerStore
from gradwire_server.errors import ServiceError, unknown_checkpoint

if TYPE_CHECKING:
    from gradwire_server.journal.run_row import RunRecord


class SavedWeights:
    """The weights that clients have saved."""

    def __init__(self, core: Core, store: TinkerStore) -> None:
        self._core, self._store = core, store

    def checkpoint(self, caller: Caller, path: str, *, expired: bool = False) -> str:
        """The core's path, ``RUN_ID/NAME``, of a checkpoint that the caller may read.

        Args:
            expired: Find it also when its time is over.
        """
        named = TinkerPath.read(path)
        model, saved_as = self._store.models.get(named.model_id), self.record(named)
        if model is None or not model.run_id:
            raise unknown_checkpoint(path)
        if not expired and saved_as is not None and saved_as.expired:
            raise unknown_checkpoint(path)
        stored = f"{model.run_id}/{named.stored_name}"
        try:
            self._core.storage.checkpoints.get(stored, caller)
        except ServiceError:
            raise unknown_checkpoint(path) from None
        return stored

    async def delete(self, caller: Caller, path: TinkerPath) -> None:
        """Delete a checkpoint or an export of a model of the caller's.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, PERMISSION_DENIED; UNSUPPORTED while a recovery could need it.
        """
        if path.kind == "external_weights":
            await self._core.runs.delete_export(caller, self.export(caller, path, expired=True))
        else:
            await self._core.runs.delete_checkpoint(caller, self.checkpoint(caller, str(path), expired=True))
        await self._store.delete(
            self._store.saved, *[each.key for each in self._store.saved.values() if each.path == str(path)]
        )

    def record(self, path: TinkerPath) -> SavedRecord | None:
        """The client's record of the weights that this path has now.

        An empty record if the client gave none; None if there are no weights.
        """
        if path.kind == "external_weights":
            return self._store.saved.get(str(path))
        saved, model = self._saved(path), self._store.models.get(path.model_id)
        if saved is None or model is None:
            return None
        empty = SavedRecord(owner=model.owner, path=str(path), seq=saved.seq)
        return self._store.saved.get(empty.key, empty)

    async def forget(self, model_id: str, seq: int) -> None:
        """Forget what the client said of weights that operation ``seq`` of a model failed to write."""
        records = self._store.saved.values()
        keys = [each.key for each in records if each.seq == seq and TinkerPath.read(each.path).model_id == model_id]
        await self._store.delete(self._store.saved, *keys)

    def is_of_what_is_there(self, record: SavedRecord) -> bool:
        """Whether a record is of the weights that its path has now."""
        now = self.record(TinkerPath.read(record.path))
        return now is not None and now.key == record.key

    def is_outdated(self, record: SavedRecord) -> bool:
        """Whether the weights of a record were not written, or were overwritten or deleted since."""
        run = self._run(TinkerPath.read(record.path))
        return run is not None and run.applied_seq >= record.seq and not self.is_of_what_is_there(record)

    def _run(self, path: TinkerPath) -> RunRecord | None:
        model = self._store.models.get(path.model_id)
        return None if model is None else self._core.storage.records.find(model.run_id)

    def _saved(self, path: TinkerPath) -> pb.Checkpoint | None:
        run = self._run(path)
        return None if run is None else run.checkpoints.get(path.stored_name)

    def export(self, caller: Caller, path: TinkerPath, *, expired: bool = False) -> str:
        """The core's path, ``RUN_ID/NAME``, of weights that the caller has exported."""
        saved, model = self._store.saved.get(str(path)), self._store.models.get(path.model_id)
        owns = model is not None and (caller.role == "admin" or caller.name == model.owner)
        if saved is None or model is None or not owns or (saved.expired and not expired):
            raise unknown_checkpoint(str(path))
        return f"{model.run_id}/{path.stored_name}"
