"""The state folder of a running server."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

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
from gradwire_server.journal.state_folder import FolderInUse, FolderLock, StateFolderError, unusable
from gradwire_server.journal.usage import Usage
from gradwire_server.stores.claim import claimed
from gradwire_server.stores.store import Store, StoreError, StoreFull, StoreUnreachable


@dataclass(frozen=True)
class Storage:
    """The state folder, open; no other server may use it meanwhile.

    Attributes:
        journal: Operations and results.
        usage: The usage of every key.
        folders: The store of the runs' checkpoints and exports, and of uploads.
        records: The rows of the runs.
        checkpoints: The rows of their checkpoints.
        jobs, files, sessions: The rows of jobs, of files, and of rollout sessions.
    """

    journal: Journal
    usage: Usage
    folders: Store
    records: RunRecords
    checkpoints: CheckpointRecords
    jobs: JobRecords
    files: FileRecords
    sessions: SessionRecords

    @staticmethod
    async def open(
        config: ServerConfig, lock: FolderLock, closing: AsyncExitStack
    ) -> tuple[Storage, Sequence[RunRecord]]:
        """Lock the folder and open everything; return it with the runs.

        Args:
            closing: Gets what finishes the writes, closes the files and unlocks the folder, also if this fails.

        Raises:
            SystemExit: The folder is in use or cannot be read; with a message.
        """
        try:
            make_folder(config.state_dir, 0o700)
            lock.take()
            closing.callback(lock.release)
            await asyncio.to_thread(state_folder.check, config.state_dir)
            journal = await Journal.open(
                config.state_dir,
                keep_payloads=config.durability == "journal",
                history_points=config.limits.max_history_points,
                accept_changes=config.accept_changes,
            )
            closing.push_async_callback(journal.close)
            store, usage = journal.store, Usage(journal.store)
            closing.callback(usage.save)
            folders = await asyncio.to_thread(claimed, config)
            records = RunRecords(store, config.state_dir, config.limits.max_runs, folders)
            checkpoints = CheckpointRecords(records, store, folders)
            rows = JobRecords(store), FileRecords(store), SessionRecords(store)
            return Storage(journal, usage, folders, records, checkpoints, *rows), await records.load()
        except (FolderInUse, StoreFull, StoreUnreachable) as error:
            raise NotNow(f"gradwire: {error}") from error
        except (StateFolderError, StoreError) as error:
            raise SystemExit(f"gradwire: {error}") from error
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise unusable(error, config.state_dir) from error
