"""Atomic creation of folders: a folder gets its name only once all its content is on disk."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradwire_proto.v1 import training_pb2
from safetensors import SafetensorError

from gradwire_server.crash_points import crash_point
from gradwire_server.durable_files import sync, sync_tree
from gradwire_server.engine.errors import OperationError


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Provide an empty folder that replaces ``place`` once the context ends without an error and all is on disk.

    An existing folder stays until then. Partial folders left beside it by an earlier crash are removed.

    Raises:
        OperationError: STORAGE_FULL.
    """
    for abandoned in place.parent.glob(".new-*"):
        shutil.rmtree(abandoned)
    new = place.parent / f".new-{secrets.token_hex(8)}"
    try:
        try:
            new.mkdir()
            yield new
            sync_tree(new)
            crash_point("engine.before_rename")
            if place.exists():
                _exchange(new, place)
            else:
                new.rename(place)
            crash_point("engine.after_rename")
            sync(place.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if _is_full(error):
            raise OperationError(
                training_pb2.ERROR_CODE_STORAGE_FULL, f"the server's disk is full: {place.name!r} was not written"
            ) from error
        raise


def _is_full(error: OSError | SafetensorError) -> bool:
    """Whether the disk has no room; safetensors gives the system's error in its text only."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in numbers
    return any(f"(os error {number})" in str(error) for number in numbers)


def folder_bytes(folder: Path) -> int:
    """Total bytes of all files in a folder and its subfolders."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _exchange(new: Path, place: Path) -> None:
    """Swap two folders atomically if the file system supports it; otherwise the name is missing for a moment."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    if swap is not None and swap(at_cwd, os.fsencode(new), at_cwd, os.fsencode(place), exchange) == 0:
        return
    aside = place.parent / f".new-{secrets.token_hex(8)}"
    place.rename(aside)
    new.rename(place)
    shutil.rmtree(aside)
