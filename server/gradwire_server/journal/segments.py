"""Append-only files for payloads, beside the database that refers to them.

A record is a magic word, the length, the BLAKE2b-128 digest, and the bytes. It is valid once a committed row refers to
it. A record torn by a crash has no row, and nothing is appended after it: each opening of the folder starts a new file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire_server.durable_files import make_folder, sync

_HEADER = struct.Struct("<4sQ16s")
_MAGIC = b"gwr1"
SEGMENT_BYTES = 64 << 20

Buffer = bytes | bytearray | memoryview


class CorruptRecord(Exception):
    """A record is cut short, or its bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class Location:
    """Position of a record: segment number and offset in bytes."""

    segment: int
    offset: int


class Segments:
    """The folder of segments.

    Call ``append``, ``sync``, ``abandon`` and ``closed`` from one thread; ``read`` and ``forget`` from any.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self._segment_bytes = folder, segment_bytes
        make_folder(folder)
        self._fd = -1
        self._dirty = False
        numbers = self.numbers()
        self._current = numbers[-1] if numbers else 0

    def numbers(self) -> list[int]:
        """Numbers of the existing segments, oldest first."""
        return sorted(int(path.stem) for path in self._folder.glob("*.segment"))

    def append(self, buffers: Sequence[Buffer]) -> Location:
        """Write a record; durable after the next :meth:`sync`."""
        if self._fd < 0 or os.fstat(self._fd).st_size >= self._segment_bytes:
            self._roll()
        length, digest = 0, hashlib.blake2b(digest_size=16)
        for buffer in buffers:
            length += len(buffer)
            digest.update(buffer)
        offset = os.fstat(self._fd).st_size
        self._dirty = True
        try:
            for buffer in (_HEADER.pack(_MAGIC, length, digest.digest()), *buffers):
                view = memoryview(buffer)
                while view:
                    view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, offset)
            raise
        return Location(self._current, offset)

    def sync(self) -> None:
        """Make every record written so far durable."""
        if self._dirty:
            os.fsync(self._fd)
            self._dirty = False

    def abandon(self) -> None:
        """Close the current file and continue in a new one: after a failed fsync, the old file's content is unknown."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._dirty = -1, False

    def read(self, location: Location) -> bytearray:
        """Read the bytes of a record.

        Raises:
            CorruptRecord: They are not those that were written.
        """
        try:
            fd = os.open(self._path(location.segment), os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptRecord(f"segment {location.segment} is gone") from error
        try:
            return _read(fd, location.offset)
        finally:
            os.close(fd)

    def closed(self) -> set[int]:
        """Numbers of the segments to which nothing will be appended."""
        return set(self.numbers()) - {self._current}

    def forget(self, numbers: set[int]) -> None:
        """Delete closed segments."""
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Make every record durable and close the file."""
        self.sync()
        self.abandon()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.segment"

    def _roll(self) -> None:
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
        self._fd = -1
        self._current += 1
        self._fd = os.open(self._path(self._current), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        sync(self._folder)


def _read(fd: int, offset: int) -> bytearray:
    header = os.pread(fd, _HEADER.size, offset)
    if len(header) < _HEADER.size:
        raise CorruptRecord("a record is cut short")
    magic, length, digest = _HEADER.unpack(header)
    if magic != _MAGIC or offset + _HEADER.size + length > os.fstat(fd).st_size:
        raise CorruptRecord("a record is cut short")
    data = bytearray(length)
    view, position = memoryview(data), offset + _HEADER.size
    while view:
        count = os.preadv(fd, [view], position)
        if not count:
            raise CorruptRecord("a record is cut short")
        view, position = view[count:], position + count
    if hashlib.blake2b(data, digest_size=16).digest() != digest:
        raise CorruptRecord("a record's bytes do not match its checksum")
    return data
