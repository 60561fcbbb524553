"""Folders and names that survive a power cut: what a program creates is on disk once its folder is fsynced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def link_or_copy(source: str, target: str) -> None:
    """Give a file that no longer changes a second name; copy it where it cannot be linked."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def sync(path: Path) -> None:
    """Fsync a file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Fsync every file and folder below this one, and the names in it; its own name is up to the folder above."""
    for entry in [*folder.rglob("*"), folder]:
        sync(entry)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Provide a name to write a new file under, which replaces ``path`` and is on disk once the context ends."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    yield partial
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file such that a crash leaves the old or the new one; on disk when this returns.

    Args:
        mode: Permissions of the new file, less the umask.
    """
    with (
        replacing_file(path) as partial,
        open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file,
    ):
        file.write(text)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder, and those above it where they are missing; their names are on disk when this returns.

    Args:
        mode: of the folder itself. An existing one keeps its own.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def is_full(error: Exception) -> bool:
    """Whether the disk has no room; safetensors gives the system's error in its text only."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in numbers
    return any(f"(os error {number})" in str(error) for number in numbers)
