"""Download files of checkpoints and exports to a local folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import ConnectionLostError, InternalServerError, InvalidArgumentError
from gradwire.wire.transport import Transport

PART = ".part"


def check_folder(label: str, path: str | os.PathLike[str]) -> None:
    """Check that a path can become a folder.

    Raises:
        InvalidArgumentError: It, or something above it, is a file.
    """
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise InvalidArgumentError(
                f"{label}: {place} is a file, and the files go to a folder: give another path, or remove it",
                field="path", rule="a folder",
            )  # fmt: skip


async def download(transport: Transport, request: pb.DownloadRequest, folder: Path) -> Path:
    """Write the files below ``folder``, which is created; each file gets its final name once it is complete.

    Raises:
        ConnectionLostError: The stream ended before the last file was complete.
        InvalidArgumentError: The folder cannot be made or written to.
    """
    try:
        return await _download(transport, request, folder)
    except TimeoutError:
        raise
    except OSError as error:
        raise InvalidArgumentError(
            f"the files cannot be written to {folder}: {error.strerror or error}; make room for them or give another "
            "path",
            field="path",
            rule="a folder that can be written to",
        ) from error


async def _download(transport: Transport, request: pb.DownloadRequest, folder: Path) -> Path:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    target, missing = folder, 0
    file: BinaryIO | None = None
    try:
        async with contextlib.aclosing(transport.download(request)) as frames:
            async for frame in frames:
                if frame.file:
                    if missing:
                        raise ConnectionLostError(f"{transport.address} left {target.name} {missing} bytes short")
                    target, missing = _inside(folder, frame.file), frame.size_bytes
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file = await asyncio.to_thread(_part(target).open, "wb")
                if file is None or len(frame.chunk) > missing:
                    raise InternalServerError("the server sent more than it announced")
                await asyncio.to_thread(file.write, frame.chunk)
                missing -= len(frame.chunk)
                if not missing:
                    await asyncio.to_thread(file.close)
                    _part(target).replace(target)
                    file = None
    finally:
        if file is not None:
            file.close()
            _part(target).unlink(missing_ok=True)
    if missing:
        raise ConnectionLostError(
            f"{transport.address} ended the download {missing} bytes before the end of {target.name}"
        )
    return folder


def _part(target: Path) -> Path:
    return target.with_name(target.name + PART)


def _inside(folder: Path, name: str) -> Path:
    """Resolve the path of a file below the folder and refuse names that lead outside it."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name:
        raise InternalServerError(f"the server sent a file named {name!r}, which is not below the folder")
    return folder.joinpath(*path.parts)
