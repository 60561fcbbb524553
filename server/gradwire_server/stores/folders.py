"""The store in a folder: the state folder itself, or one that several machines share.

A folder gets its name only once all its content is on disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradwire_server.checkpoint_files import DamagedCheckpoint, StoredFile
from gradwire_server.crash_points import crash_point
from gradwire_server.durable_files import is_full, link_or_copy, make_folder, replace_text, sync, sync_tree
from gradwire_server.stores.store import IDENTITY, PASSING, Place, Store, StoreFull, Superseded

FENCE = ".fence"
"""File of an owner's folder with the number of its newest holder."""


class FolderStore(Store):
    """A store in a folder.

    Args:
        fenced: Whether several machines write to it, of which one may not know yet that it no longer holds a run.
        staging: Folder on the same file system through which this process writes, instead of beside the places
            themselves. Who deletes it keeps the process from putting anything in its place, whatever that is about to
            do, because the rename at the end needs it.
    """

    def __init__(self, root: Path, *, fenced: bool = False, staging: Path | None = None) -> None:
        self._root, self.fenced, self._staging = root, fenced, staging

    def identity(self, proposed: str) -> str:
        file = self._root / IDENTITY
        make_folder(self._root)
        if not file.exists():
            replace_text(file, json.dumps({"id": proposed}))
        return str(json.loads(file.read_text())["id"])

    def fence(self, owner: str) -> int:
        if not self.fenced:
            return 0
        folder = self._root / owner
        make_folder(folder)
        with self._locked(owner):
            number = self._newest(owner) + 1
            replace_text(folder / FENCE, str(number))
        return number

    @contextmanager
    def replacing(self, place: Place, fence: int = 0) -> Iterator[Path]:
        path = self._path(place)
        make_folder(path.parent)
        self._check_fence(place, fence)
        parent = self._staging or path.parent
        for abandoned in parent.glob(".new-*"):  # by an earlier crash
            shutil.rmtree(abandoned)
        new = parent / f".new-{secrets.token_hex(8)}"
        try:
            try:
                new.mkdir()
                yield new
                sync_tree(new)
                crash_point("engine.before_rename")
                if fence:
                    with self._locked(place.owner):
                        self._check_fence(place, fence)
                        _rename(new, path)
                else:
                    _rename(new, path)
                crash_point("engine.after_rename")
                sync(path.parent)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        except Exception as error:
            if self._staging is not None and not self._staging.is_dir():
                raise superseded(place) from error
            if is_full(error):
                raise StoreFull(f"the server's disk is full: {path.name!r} was not written") from error
            raise

    def take(self, place: Place, folder: Path) -> None:
        if folder != self._path(place):
            with self.replacing(place) as new:
                shutil.copytree(folder, new, dirs_exist_ok=True)

    @contextmanager
    def reading(self, place: Place, *files: str) -> Iterator[Path]:
        path = self._path(place)
        if not path.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        folder = _identity(path)
        yield path
        if _identity(path) not in (folder, None):
            raise DamagedCheckpoint(f"{path.name} was replaced by a newer one while it was read; read it again")

    def check(self, place: Place, file: str, stored: StoredFile) -> None:
        stored.check(self._path(place) / file)

    def sizes(self, place: Place) -> dict[str, int]:
        path = self._path(place)
        return {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}

    def has(self, place: Place) -> bool:
        return self._path(place).is_dir()

    def names(self, owner: str, kind: str) -> list[str]:
        folder = self._root / owner / kind
        found = os.listdir(folder) if folder.is_dir() else []
        return sorted(name for name in found if not name.startswith("."))

    def copy(self, source: Place, target: Place) -> None:
        here, there = self._path(source), self._path(target)
        make_folder(there.parent)
        copied = False
        while not copied:
            folder = _identity(here)
            shutil.rmtree(there, ignore_errors=True)  # of an earlier copy that a crash or another save has cut off
            try:
                shutil.copytree(here, there, copy_function=link_or_copy)
            except OSError as error:
                if not here.exists():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(here)) from error
                if _identity(here) == folder:
                    raise
            else:
                copied = _identity(here) in (folder, None)
        sync_tree(there)
        sync(there.parent)

    def delete(self, place: Place) -> None:
        shutil.rmtree(self._path(place), ignore_errors=True)

    def delete_all(self, owner: str) -> None:
        shutil.rmtree(self._root / owner, ignore_errors=True)

    def inspect(self, owners: set[str], say: Callable[[str], object], *, tidy: bool = False) -> int:
        superfluous = [
            folder
            for kind in ("runs", "uploads", PASSING)
            for folder in sorted((self._root / kind).glob("*"))
            if f"{kind}/{folder.name}" not in owners
        ]
        for folder in superfluous:
            say(f"{folder} is superfluous: it belongs to no run or upload{', and was deleted' if tidy else ''}")
            if tidy:
                shutil.rmtree(folder)
        return len(superfluous)

    def _path(self, place: Place) -> Path:
        return self._root / place.owner / place.name

    @contextmanager
    def _locked(self, owner: str) -> Iterator[None]:
        """Hold the lock of an owner's folder against other processes."""
        descriptor = os.open(self._root / owner, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _newest(self, owner: str) -> int:
        file = self._root / owner / FENCE
        return int(file.read_text()) if file.exists() else 0

    def _check_fence(self, place: Place, fence: int) -> None:
        if fence and self._newest(place.owner) != fence:
            raise superseded(place)


def superseded(place: Place) -> Superseded:
    """The error for a writer that is no longer the holder."""
    return Superseded(
        f"{place} was not written: another engine holds {place.owner} now. This one was taken for lost; its work was"
        " given to the other"
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """A value that distinguishes a folder from a later one of the same name; None for a missing folder."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _rename(new: Path, path: Path) -> None:
    if path.exists():
        _exchange(new, path)
    else:
        new.rename(path)


def _exchange(new: Path, path: Path) -> None:
    """Swap two folders atomically if the file system supports it; otherwise the name is missing for a moment."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    if swap is not None and swap(at_cwd, os.fsencode(new), at_cwd, os.fsencode(path), exchange) == 0:
        return
    aside = new.parent / f".new-{secrets.token_hex(8)}"
    path.rename(aside)
    new.rename(path)
    shutil.rmtree(aside)
