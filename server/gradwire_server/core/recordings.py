"""Records of runs, written for a caller who takes them away."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from gradwire_server.access.keys import Caller
from gradwire_server.durable_files import make_folder
from gradwire_server.journal.provable import write_record
from gradwire_server.journal.storage import Storage
from gradwire_server.stores.store import CHECKPOINTS, Place

RECORDS = "records"
"""Folder in the state folder for records while they are sent."""


class Recordings:
    """Records of the runs of a state folder."""

    def __init__(self, state_dir: Path, storage: Storage) -> None:
        self._state_dir, self._storage = state_dir, storage

    def clean(self) -> None:
        """Delete the records that a killed server left."""
        shutil.rmtree(self._state_dir / RECORDS, ignore_errors=True)

    @asynccontextmanager
    async def folder(self, caller: Caller, run_id: str, *, signed: bool) -> AsyncGenerator[Path]:
        """A folder with the record of a run, which is deleted with the context.

        Raises:
            ServiceError: UNKNOWN_RUN; PERMISSION_DENIED for a run that the caller may only read; UNKNOWN_CHECKPOINT for
                one of another run that it reads and the caller may not; UNSUPPORTED for one that cannot be recorded.
        """
        records, checkpoints = self._storage.records, self._storage.checkpoints

        def readable(path: str) -> Place:
            run, found = checkpoints.get(path, caller)
            return checkpoints.place(run.run_id, CHECKPOINTS, found.name)

        run, parent = records.get(run_id, caller, write=True), self._state_dir / RECORDS
        await asyncio.to_thread(make_folder, parent, 0o700)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=parent))
        try:
            sign_with = self._state_dir if signed else None
            await write_record(self._storage.journal, run, self._storage.folders, folder, readable, sign_with)
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
