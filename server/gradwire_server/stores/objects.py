"""The store in an object store: S3, Google Cloud Storage, Azure, or what speaks one of their protocols.

An owner's folders are listed in one object, ``OWNER/manifest.json``, with the size and digest of each file; the files
are objects ``OWNER/DATA/FILE``, where ``DATA`` is a random name for each time that a folder is written. The manifest is
written last, and only on top of the version that was read. So a folder exists completely or not at all, and a writer
that was superseded is refused, because the manifest has the newest holder's number. Objects to which no manifest
refers, as a crash leaves them, are found by :meth:`ObjectStore.inspect`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from gradwire_server.checkpoint_files import DamagedCheckpoint, StoredFile, sealed, unsealed
from gradwire_server.crash_points import crash_point
from gradwire_server.durable_files import is_full, link_or_copy
from gradwire_server.stores.bucket import Bucket, Conflict, Missing
from gradwire_server.stores.cache import Cache
from gradwire_server.stores.folders import superseded
from gradwire_server.stores.store import IDENTITY, PASSING, Place, Store, StoreError, StoreFull

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
THREADS = 16
Folders = dict[str, dict[str, Any]]


class DamagedManifest(StoreError):
    """The list of an owner's folders cannot be read."""


class ObjectStore(Store):
    """A store in a bucket.

    Args:
        bucket: The bucket, below the prefix of this store.
        cache: Copies on this machine of recently written and read folders.
    """

    def __init__(self, bucket: Bucket, cache: Cache) -> None:
        self._bucket, self._cache = bucket, cache
        self.threads = ThreadPoolExecutor(THREADS, "store")

    def identity(self, proposed: str) -> str:
        try:
            self._bucket.put(IDENTITY, json.dumps({"id": proposed}).encode(), None)
        except Conflict:
            content, _ = self._bucket.get(IDENTITY)
            return str(json.loads(content)["id"])
        return proposed

    def fence(self, owner: str) -> int:
        def next_holder(manifest: dict[str, Any]) -> None:
            manifest["fence"] += 1

        # Where the first answer is lost, the number rises twice: each is still given out once.
        return int(self._edit(owner, next_holder)["fence"])

    @contextmanager
    def replacing(self, place: Place, fence: int = 0) -> Iterator[Path]:
        data = secrets.token_hex(16)
        try:
            with self._cache.filling(data) as folder:
                yield folder
                crash_point("engine.before_rename")
                self._write(place, data, folder, fence)
                crash_point("engine.after_rename")
        except Exception as error:
            if is_full(error):
                raise StoreFull(
                    f"the disk is full: {place} was not written to {self._bucket.url}, for which it must fit on this"
                    " machine first (--store-cache bounds what stays)"
                ) from error
            raise
        self._cache.make_room()

    def take(self, place: Place, folder: Path) -> None:
        with self.replacing(place) as new:
            shutil.copytree(folder, new, copy_function=link_or_copy, dirs_exist_ok=True)

    def _write(self, place: Place, data: str, folder: Path, fence: int) -> None:
        """Upload a folder under a new name, and then list it."""
        files = {
            file.relative_to(folder).as_posix(): StoredFile.of(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        if fence and self._manifest(place.owner)["fence"] != fence:
            raise superseded(place)  # before the bytes have travelled
        try:
            for name, stored in files.items():
                self._bucket.upload(f"{place.owner}/{data}/{name}", folder / name, stored.size)
                crash_point("store.between_objects")
            self._list(place, data, {name: asdict(stored) for name, stored in files.items()}, fence)
        except StoreError:
            self._delete_data(place.owner, data)
            raise

    def _list(self, place: Place, data: str, files: dict[str, Any], fence: int = 0) -> None:
        """Let a place name uploaded data, and delete what it named before."""
        before: list[str] = []

        def enter(manifest: dict[str, Any]) -> None:
            if fence and manifest["fence"] != fence:
                raise superseded(place)
            old = manifest["folders"].get(place.name)
            if old is not None and old["data"] != data:
                before[:] = [old["data"]]
            manifest["folders"][place.name] = {"data": data, "files": files}

        self._edit(place.owner, enter)
        for old in before:
            self._delete_data(place.owner, old)

    @contextmanager
    def reading(self, place: Place, *files: str) -> Iterator[Path]:
        for attempt in (1, 2):
            entry = self._entry(place)
            with self._cache.holding(entry["data"]) as folder:
                try:
                    for name in files or entry["files"]:
                        if name in entry["files"]:
                            self._fetch(place, entry["data"], name, StoredFile(**entry["files"][name]), folder / name)
                except DamagedCheckpoint:
                    if attempt == 1 and self._entry(place) != entry:  # it was replaced meanwhile
                        continue
                    raise
                yield folder
            self._cache.make_room()
            return

    def _fetch(self, place: Place, data: str, name: str, stored: StoredFile, file: Path) -> None:
        """Download a file, unless this machine has it as it was written.

        Raises:
            DamagedCheckpoint: It is not in the store, or not as it was written.
            StoreFull: There is no room on this machine.
        """
        try:
            stored.check(file)
            return
        except DamagedCheckpoint:
            pass
        self._cache.make_room(stored.size)
        partial = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as stream:
                self._read(f"{place.owner}/{data}/{name}", name, stored, stream)
            partial.rename(file)
        except OSError as error:
            if is_full(error):
                raise StoreFull(f"the disk is full: {name} of {place} was not read from {self._bucket.url}") from error
            raise
        finally:
            partial.unlink(missing_ok=True)

    def _read(self, key: str, name: str, stored: StoredFile, to: BinaryIO | None = None) -> None:
        """Read an object in pieces, write them to a file, and compare them with what was saved."""
        try:
            size = self._bucket.size(key)
            if size != stored.size:
                raise DamagedCheckpoint(f"{name} has {size} bytes and had {stored.size} when it was saved")
            state = hashlib.blake2b(digest_size=32)
            for piece in self._bucket.download(key, size):
                state.update(piece)
                if to is not None:
                    to.write(piece)
        except Missing:
            raise DamagedCheckpoint(f"{name} is missing") from None
        if state.hexdigest() != stored.blake2b:
            raise DamagedCheckpoint(f"{name} has changed since it was saved: its checksum does not match")

    def check(self, place: Place, file: str, stored: StoredFile) -> None:
        try:
            self._read(f"{place.owner}/{self._entry(place)['data']}/{file}", file, stored)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{file} is missing") from None

    def sizes(self, place: Place) -> dict[str, int]:
        entry = self._folders(place.owner).get(place.name)
        if entry is None:
            return {}
        below = f"{place.owner}/{entry['data']}/"
        return {key.removeprefix(below): size for key, size in self._bucket.listing(below)}

    def has(self, place: Place) -> bool:
        return place.name in self._folders(place.owner)

    def names(self, owner: str, kind: str) -> list[str]:
        return sorted(name.partition("/")[2] for name in self._folders(owner) if name.startswith(f"{kind}/"))

    def copy(self, source: Place, target: Place) -> None:
        entry, data = self._entry(source), secrets.token_hex(16)
        try:
            for name, stored in entry["files"].items():
                here, there = f"{source.owner}/{entry['data']}/{name}", f"{target.owner}/{data}/{name}"
                self._bucket.copy(here, there, stored["size"])
            self._list(target, data, entry["files"])
        except (StoreError, Missing) as error:
            self._delete_data(target.owner, data)
            if isinstance(error, StoreError):
                raise
            if self._entry(source) == entry:
                raise FileNotFoundError(str(source)) from error
            self.copy(source, target)  # of what has replaced it meanwhile

    def delete(self, place: Place) -> None:
        dropped: list[str] = []

        def drop(manifest: dict[str, Any]) -> None:
            entry = manifest["folders"].pop(place.name, None)
            if entry is not None:
                dropped.append(entry["data"])

        if self.has(place):
            self._edit(place.owner, drop)
        for data in dict.fromkeys(dropped):
            self._delete_data(place.owner, data)

    def delete_all(self, owner: str) -> None:
        self._bucket.delete([f"{owner}/{MANIFEST}"])  # first: what follows is then superfluous, not missing
        self._bucket.delete([key for key, _ in self._bucket.listing(f"{owner}/")])

    def inspect(self, owners: set[str], say: Callable[[str], object], *, tidy: bool = False) -> int:
        there: dict[str, int] = {}
        for kind in ("runs", "uploads", PASSING):
            there |= self._bucket.listing(f"{kind}/")
        found = {"/".join(key.split("/")[:2]) for key in there}
        wrong: list[str] = []
        for owner in sorted(found & owners):
            lost = there.pop(f"{owner}/{MANIFEST}", None) is None and f"{owner}/{MANIFEST} is missing"
            try:
                folders = self._folders(owner)
            except DamagedManifest:
                lost, folders = f"{owner}/{MANIFEST} is damaged", {}
            if lost:  # what it listed may be saved by an older version of it, and is not superfluous
                there = {key: size for key, size in there.items() if not key.startswith(f"{owner}/")}
                wrong.append(f"{lost}, and so all that it listed; put an older version of it back, if there is one")
            for name, entry in folders.items():
                for file, stored in entry["files"].items():
                    size = there.pop(f"{owner}/{entry['data']}/{file}", None)
                    if size is None:
                        wrong.append(f"{owner}/{name}: {file} is missing")
                    elif size != stored["size"]:
                        wrong.append(f"{owner}/{name}: {file} is torn, {size} of {stored['size']} bytes")
        superfluous = sorted(there)
        for sentence in wrong:
            say(f"{self._bucket.url}/{sentence}")
        for key in superfluous:
            deleted = ", and was deleted" if tidy else ""
            say(f"{self._bucket.url}/{key} is superfluous: no manifest of a run or upload refers to it{deleted}")
        if tidy:
            self._bucket.delete(superfluous)
        return len(wrong) + len(superfluous)

    # ---- the manifest ----

    def _entry(self, place: Place) -> dict[str, Any]:
        entry = self._folders(place.owner).get(place.name)
        if entry is None:
            raise FileNotFoundError(f"{self._bucket.url}/{place}")
        return entry

    def _folders(self, owner: str) -> Folders:
        folders: Folders = self._manifest(owner)["folders"]
        return folders

    def _manifest(self, owner: str) -> dict[str, Any]:
        return self._versioned(owner)[0]

    def _versioned(self, owner: str) -> tuple[dict[str, Any], Any]:
        """The manifest of an owner and its version; an empty one without a version if there is none."""
        try:
            content, version = self._bucket.get(f"{owner}/{MANIFEST}")
        except Missing:
            return {"fence": 0, "folders": {}}, None
        try:
            manifest: dict[str, Any] = unsealed(content)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedManifest(
                f"{self._bucket.url}/{owner}/{MANIFEST} is damaged ({error}), and with it all that it lists; put an"
                " older version of it back, if the bucket keeps them"
            ) from error
        return manifest, version

    def _edit(self, owner: str, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Change a manifest, again where another writer was quicker; returns the new one.

        Args:
            change: Changes the manifest that it is given. It may be called again, also after it took effect.
        """
        while True:
            manifest, version = self._versioned(owner)
            changed = copy.deepcopy(manifest)
            change(changed)
            if changed == manifest:
                return changed
            try:
                self._bucket.put(f"{owner}/{MANIFEST}", sealed(changed).encode(), version)
            except Conflict:
                continue
            return changed

    def _delete_data(self, owner: str, data: str) -> None:
        """Delete the objects of a folder that nothing refers to; where the store fails, they are superfluous there."""
        self._cache.drop(data)
        try:
            self._bucket.delete([key for key, _ in self._bucket.listing(f"{owner}/{data}/")])
        except StoreError as error:
            log.warning("objects that nothing refers to stay in %s/%s: %s", owner, data, error)
