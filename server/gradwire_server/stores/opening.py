"""Opening the store that the settings name."""

from __future__ import annotations

from pathlib import Path

from gradwire_server.config import EngineSettings
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import Store, StoreError

CACHE = "store-cache"
"""Folder in the state folder with what was read from an object store."""

CACHE_BYTES = 32 << 30


def open_store(settings: EngineSettings, staging: Path | None = None) -> Store:
    """The store of checkpoints, exports and uploads.

    Args:
        staging: Where an engine on another machine writes what the state folder gets; see :class:`.FolderStore`.

    Raises:
        StoreError: Its package is not installed, or its address cannot be used.
    """
    if not settings.store:
        return FolderStore(settings.state_dir, staging=staging)
    if settings.store.startswith("file://"):
        return FolderStore(Path(settings.store.removeprefix("file://")), fenced=True)
    try:
        from gradwire_server.stores.bucket import Bucket
        from gradwire_server.stores.cache import Cache
        from gradwire_server.stores.objects import ObjectStore
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        message = f"--store {settings.store} needs a package that is not installed: pip install 'gradwire[store]'"
        raise StoreError(message) from error
    cache = Cache(settings.state_dir / CACHE, CACHE_BYTES if settings.store_cache is None else settings.store_cache)
    return ObjectStore(Bucket(settings.store, settings.store_patience), cache)
