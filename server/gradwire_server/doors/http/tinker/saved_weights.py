"""Checkpoints and exported weights of the protocol, by their paths."""

from __future__ import annotations

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.store import TinkerStore
from gradwire_server.errors import ServiceError, unknown_checkpoint


class SavedWeights:
    """What clients have saved.

    Args:
        core: The core that holds it.
        store: The door's records.
    """

    def __init__(self, core: Core, store: TinkerStore) -> None:
        self._core, self._store = core, store

    def checkpoint(self, caller: Caller, path: str, *, expired: bool = False) -> str:
        """The core's path, ``RUN_ID/NAME``, of a checkpoint that the caller may read.

        Args:
            expired: Find it also when its time is over.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, INVALID_ARGUMENT.
        """
        named = TinkerPath.read(path)
        model, saved_as = self._store.models.get(named.model_id), self._store.saved.get(path)
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
        await self._store.delete(self._store.saved, str(path))

    def export(self, caller: Caller, path: TinkerPath, *, expired: bool = False) -> str:
        """The core's path, ``RUN_ID/NAME``, of weights that the caller has exported.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT.
        """
        saved, model = self._store.saved.get(str(path)), self._store.models.get(path.model_id)
        owns = model is not None and (caller.role == "admin" or caller.name == model.owner)
        if saved is None or model is None or not owns or (saved.expired and not expired):
            raise unknown_checkpoint(str(path))
        return f"{model.run_id}/{path.stored_name}"
