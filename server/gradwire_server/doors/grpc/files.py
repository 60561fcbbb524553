"""Download frames of the files of a checkpoint or an export."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import SUMS
from gradwire_server.config import CHUNK_BYTES


async def frames(
    folder: Path, turn: Callable[[], AbstractAsyncContextManager[object]]
) -> AsyncGenerator[pb.DownloadFrame]:
    """Yield every regular file below a folder in chunks, in order of path; links are not followed.

    Args:
        turn: Waits for the caller's turn to read from the disk.
    """

    def list_files() -> list[tuple[Path, int]]:
        found = sorted(
            path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.name != SUMS
        )
        return [(path, path.stat().st_size) for path in found]

    async with turn():
        listed = await asyncio.to_thread(list_files)
    for path, size in listed:
        frame = pb.DownloadFrame(file=path.relative_to(folder).as_posix(), size_bytes=size)
        file = await asyncio.to_thread(path.open, "rb")
        try:
            left = size
            while left or frame.file:
                async with turn():
                    chunk = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
                if left and not chunk:
                    raise OSError(f"{path} was cut short while it was read")
                frame.chunk = chunk
                left -= len(chunk)
                yield frame
                frame = pb.DownloadFrame()
        finally:
            file.close()
