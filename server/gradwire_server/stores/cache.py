"""A cache of folders on this machine, bounded in bytes, which its front and engines share.

Each folder has the random name under which its content is stored, so it is never stale. Whoever reads or fills one
holds a shared lock on it, and nobody deletes it meanwhile; the system drops the lock when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".new-"


class Cache:
    """The cache.

    Args:
        folder: Its folder; made when it is first used.
        max_bytes: Folders that were not used for longest are deleted beyond it. What is being used may exceed it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    @contextmanager
    def holding(self, name: str) -> Iterator[Path]:
        """Provide the folder of a name, empty at first, and keep it while the context lasts."""
        with self._held(self._folder / name) as folder:
            os.utime(folder)
            yield folder

    @contextmanager
    def filling(self, name: str) -> Iterator[Path]:
        """Provide an empty folder, which becomes that of a name once the context ends without an error."""
        with self._held(self._folder / f"{UNFINISHED}{name}") as new:
            try:
                yield new
                new.rename(self._folder / name)
            finally:
                shutil.rmtree(new, ignore_errors=True)

    @contextmanager
    def _held(self, folder: Path) -> Iterator[Path]:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:  # deleted at this moment
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                    yield folder
                    return
            finally:
                os.close(descriptor)

    def make_room(self, size: int = 0) -> None:
        """Delete what was not used for longest, until this many bytes more fit, and what killed processes left."""
        folders = [folder for folder in self._folder.glob("*") if folder.is_dir()]
        used: list[tuple[float, int, Path]] = []
        for folder in folders:
            if folder.name.startswith("."):
                self._delete(folder)
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                sizes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                used.append((folder.stat().st_mtime, sizes, folder))
        total = sum(sizes for _, sizes, _ in used) + size
        for _, sizes, folder in sorted(used):
            if total <= self._max_bytes:
                return
            if self._delete(folder):
                total -= sizes

    def drop(self, name: str) -> None:
        """Delete the folder of a name, if nobody uses it."""
        self._delete(self._folder / name)

    def _delete(self, folder: Path) -> bool:
        """Delete a folder unless somebody uses it; returns whether it is gone."""
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside = self._folder / f".old-{secrets.token_hex(8)}"
            folder.rename(aside)
        except (BlockingIOError, FileNotFoundError):
            return not folder.exists()
        finally:
            os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)
        return True
