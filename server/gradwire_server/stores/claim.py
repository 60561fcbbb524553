"""The claim of a state folder on the store of its checkpoints: noted in both, so that neither is used with another.

A folder that had its checkpoints in itself, and is started with a store, moves them there first.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from gradwire_server.checkpoint_files import read_sealed, sealed
from gradwire_server.config import EngineSettings
from gradwire_server.durable_files import replace_text
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.opening import open_store
from gradwire_server.stores.store import CHECKPOINTS, EXPORTS, Place, Store, StoreError, run_owner, upload_checkpoint

NOTE = "store.json"


@dataclass(frozen=True)
class Claim:
    """The place of a state folder's checkpoints.

    Attributes:
        url: Address of the store; "" for the state folder itself.
        identity: Name of the store, which it holds itself.
    """

    url: str = ""
    identity: str = ""


def claim_of(state_dir: Path) -> Claim:
    """Read where a state folder's checkpoints are.

    Raises:
        StoreError: The note is damaged.
    """
    try:
        return Claim(**read_sealed(state_dir / NOTE))
    except FileNotFoundError:
        return Claim()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{state_dir / NOTE}, which names the store of the checkpoints, is damaged: {error}"
        ) from error


def stored(state_dir: Path) -> Store | None:
    """Open the store in which a state folder's checkpoints are; None if they are in the folder itself.

    Raises:
        StoreError: It cannot be used.
    """
    url = claim_of(state_dir).url
    return open_store(EngineSettings(store=url, state_dir=state_dir)) if url else None


def claimed(settings: EngineSettings) -> Store:
    """Open the store of a state folder; on the first time, move there what the folder has.

    Raises:
        StoreError: It is another one than that in which the folder's checkpoints are, or cannot be used.
    """
    before = claim_of(settings.state_dir)
    if not settings.store:
        if before.url:
            raise StoreError(
                f"the checkpoints of {settings.state_dir} are in {before.url}, and the server was started without it:"
                f" give --store {before.url}"
            )
        return open_store(settings)
    store = open_store(settings)
    proposed = before.identity or secrets.token_hex(8)
    if not before.identity:  # first, so that a crash after the next line does not lose the store
        replace_text(settings.state_dir / NOTE, sealed(asdict(Claim("", proposed))))
    identity = store.identity(proposed)
    if identity != proposed:
        hint = f"its checkpoints are in {before.url}" if before.url else "give an empty bucket or another prefix"
        raise StoreError(f"--store {settings.store} belongs to another server than {settings.state_dir}: {hint}")
    if not before.url:
        _move(settings.state_dir, store)
    if before.url != settings.store:
        replace_text(settings.state_dir / NOTE, sealed(asdict(Claim(settings.store, identity))))
    if not before.url:
        _delete(settings.state_dir)
    return store


def _move(state_dir: Path, store: Store) -> None:
    for place in _places(state_dir):
        store.take(place, state_dir / place.owner / place.name)


def _delete(state_dir: Path) -> None:
    for place in _places(state_dir):
        shutil.rmtree(state_dir / place.owner / place.name, ignore_errors=True)


def _places(state_dir: Path) -> list[Place]:
    """The folders that a state folder has in itself."""
    own = FolderStore(state_dir)
    runs = [folder.name for folder in sorted((state_dir / "runs").glob("*"))]
    uploads = [upload_checkpoint(folder.name) for folder in sorted((state_dir / "uploads").glob("*"))]
    saved = [
        Place(run_owner(run_id), f"{kind}/{name}")
        for run_id in runs
        for kind in (CHECKPOINTS, EXPORTS)
        for name in own.names(run_owner(run_id), kind)
    ]
    return [*saved, *filter(own.has, uploads)]
