"""Opening the store that the settings name."""

from __future__ import annotations

from pathlib import Path

from gradwire_server.config import EngineSettings
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import Store


def open_store(settings: EngineSettings) -> Store:
    """The store of checkpoints, exports and uploads.

    Raises:
        StoreError: Its package is not installed, or its address cannot be used.
    """
    if not settings.store:
        return FolderStore(settings.state_dir)
    return FolderStore(Path(settings.store.removeprefix("file://")), fenced=True)
