"""The state folder of a running server: locked, checked, and opened."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Sequence

from gradwire_server.config import ServerConfig
from gradwire_server.durable_files import make_folder
from gradwire_server.errors import NotNow
from gradwire_server.journal import state_folder
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.job_records import FileRecords, JobRecords
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.session_records import SessionRecords
from gradwire_server.journal.state_folder import FolderInUse, StateFolderError, unusable
from gradwire_server.journal.usage import Usage
from gradwire_server.stores.claim import claimed
from gradwire_server.stores.store import Store, StoreError, StoreFull, StoreUnreachable


class Storage:
    """The state folder. No other server may use it until :meth:`close`.

    Attributes:
        records: The rows of the runs.
        folders: The store of their checkpoints and exports, and of uploads.
        checkpoints: The rows of their checkpoints.
        jobs, files, sessions: The rows of jobs, of files, and of rollout sessions.
        usage: The usage of every key.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._lock: int | None = None
        self._opened: Journal | None = None
        self.folders: Store

    async def open(self) -> Sequence[RunRecord]:
        """Open everything; return the runs.

        Raises:
            SystemExit: The folder is in use or cannot be read; with a message.
        """
        config = self._config
        try:
            make_folder(config.state_dir, 0o700)
            self._lock = state_folder.lock(config.state_dir)
            await asyncio.to_thread(state_folder.check, config.state_dir)
            self.journal = self._opened = await Journal.open(
                config.state_dir,
                keep_payloads=config.durability == "journal",
                history_points=config.limits.max_history_points,
                accept_changes=config.accept_changes,
            )
            self.usage = Usage(self.journal.store)
            self.folders = await asyncio.to_thread(claimed, config)
            self.records = RunRecords(self.journal.store, config.state_dir, config.limits.max_runs, self.folders)
            self.checkpoints = CheckpointRecords(self.records, self.journal.store, self.folders)
            self.jobs, self.files = JobRecords(self.journal.store), FileRecords(self.journal.store)
            self.sessions = SessionRecords(self.journal.store)
            return await self.records.load()
        except (FolderInUse, StoreFull, StoreUnreachable) as error:
            raise NotNow(f"gradwire: {error}") from error
        except (StateFolderError, StoreError) as error:
            raise SystemExit(f"gradwire: {error}") from error
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise unusable(error, config.state_dir) from error

    async def close(self) -> None:
        """Finish the writes, close the files and unlock the folder. A second call does nothing."""
        journal, self._opened = self._opened, None
        if journal is not None:
            self.usage.save()
            await journal.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
