"""Append-only files of records, beside the database that refers to them.

A record is a header, a description and a payload; the BLAKE2b-128 digest in the header is of everything else. The last
record of a commit makes the records before it valid (:mod:`.commit_log`). Nothing is appended after a record that was
torn by a crash: each opening of the folder starts a new file.

Records of version 1 of the state folder have another magic word, no commit and no description.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire_server.durable_files import make_folder, sync

_HEADER = struct.Struct("<4s16sQIQ")
"""Magic word, digest, commit, lengths of description and payload."""
_MAGIC = b"gwr2"
_FIRST_HEADER = struct.Struct("<4sQ16s")
_FIRST_MAGIC = b"gwr1"
SEGMENT_BYTES = 64 << 20
_IOV_MAX = os.sysconf("SC_IOV_MAX")

Buffer = bytes | bytearray | memoryview


class CorruptRecord(Exception):
    """A record is cut short, or its bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class Location:
    """Position of a record: segment number and offset in bytes."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as found in a segment, without its payload.

    Attributes:
        commit: Number of the commit that it was written for; 0 in version 1.
        description: Its serialized description; empty in version 1.
        end: Offset of the byte after it.
    """

    location: Location
    commit: int
    description: bytes
    payload_bytes: int
    end: int


class Segments:
    """The folder of segments.

    Call ``read`` and ``forget`` from any thread, all else from one.

    Args:
        segment_bytes: Size in bytes from which on a new file is begun.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self._segment_bytes = folder, segment_bytes
        make_folder(folder)
        self._fd = -1
        self._size = 0
        self._gathered, self._gathered_bytes = list[Buffer](), 0  # counted in ``_size`` already
        self._synced_size = 0
        numbers = self.numbers()
        self._current = numbers[-1] if numbers else 0

    def numbers(self) -> list[int]:
        """Numbers of the existing segments, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob("*.segment"))

    def append(self, payload: Sequence[Buffer], description: bytes = b"", commit: int = 0) -> Location:
        """Add a record; it is in the file from the next :meth:`sync` on. Its buffers must not change until then."""
        if self._fd < 0 or self._size >= self._segment_bytes:
            self._roll()
        header = _HEADER.pack(_MAGIC, bytes(16), commit, len(description), sum(map(len, payload)))
        digest = hashlib.blake2b(header[20:], digest_size=16)
        for buffer in (description, *payload):
            digest.update(buffer)
        location = Location(self._current, self._size)
        for buffer in (header[:4] + digest.digest() + header[20:] + description, *payload):
            if len(buffer):
                self._gathered.append(buffer)
                self._gathered_bytes += len(buffer)
                self._size += len(buffer)
        return location

    def sync(self) -> None:
        """Make every record added so far durable."""
        if self._size > self._synced_size:
            self.write()
            os.fsync(self._fd)
            self._synced_size = self._size

    def write(self) -> None:
        """Write the records added so far, by one system call, and do not wait until they are durable."""
        left = [memoryview(buffer).cast("B") for buffer in self._gathered]
        try:
            while left:
                count = os.writev(self._fd, left[:_IOV_MAX])
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except OSError:
            os.ftruncate(self._fd, self._size - self._gathered_bytes)
            raise
        self._gathered, self._gathered_bytes = [], 0

    def abandon(self) -> None:
        """Take back what was added since the last sync, and go on in a new file: the old one's content is unknown."""
        if self._fd >= 0:
            with suppress(OSError):  # what is left of a commit has no successor in this file
                os.ftruncate(self._fd, self._synced_size)
            os.close(self._fd)
        self._fd = -1
        self._gathered, self._gathered_bytes, self._size = [], 0, self._synced_size

    def read(self, location: Location) -> bytearray:
        """Read the payload of a record.

        Raises:
            CorruptRecord: The bytes are not those that were written.
        """
        with self._opened(location.segment) as fd:
            return _read(fd, location)[1]

    def records(self, number: int) -> Iterator[Record]:
        """The records of a segment, checked byte by byte, up to its end or to one that is cut short.

        Raises:
            CorruptRecord: A record's bytes are not those that were written, or it is cut short.
        """
        with self._opened(number) as fd:
            offset, size = 0, os.fstat(fd).st_size
            while offset < size:
                record, _ = _read(fd, Location(number, offset))
                yield record
                offset = record.end

    def last_commit(self) -> int:
        """Number of the newest commit for which a whole record was written; 0 if there is none."""
        for number in reversed(self.numbers()):
            newest = offset = 0
            with self._opened(number) as fd:
                while (header := _header(fd, Location(number, offset))) is not None:
                    newest, offset = max(newest, header.commit), header.end
            if newest:
                return newest
        return 0

    def end_file(self, least_bytes: int = 0) -> None:
        """End the current file if it has at least this size; the next record begins another one."""
        if self._fd >= 0 and self._size >= least_bytes:
            self.sync()
            os.close(self._fd)
            self._fd, self._size = -1, 0

    def closed(self) -> set[int]:
        """Numbers of the segments to which nothing will be appended, but for the newest one."""
        return set(self.numbers()) - {self._current}

    def forget(self, numbers: set[int]) -> None:
        """Delete closed segments."""
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Make every record durable and close the file."""
        self.end_file()

    @contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        try:
            fd = os.open(self._path(number), os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptRecord(f"segment {number} is gone") from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.segment"

    def _roll(self) -> None:
        self.end_file()
        self._size = self._synced_size = 0
        self._current += 1
        self._fd = os.open(self._path(self._current), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        sync(self.folder)


def _header(fd: int, location: Location) -> Record | None:
    """The record at a position, without its description; None if it is cut short or there is none."""
    offset = location.offset
    raw = os.pread(fd, _HEADER.size, offset)
    commit = description_bytes = 0
    if raw[:4] == _FIRST_MAGIC and len(raw) >= _FIRST_HEADER.size:
        start = offset + _FIRST_HEADER.size
        _, payload_bytes, _ = _FIRST_HEADER.unpack(raw[: _FIRST_HEADER.size])
    elif raw[:4] == _MAGIC and len(raw) == _HEADER.size:
        start = offset + _HEADER.size
        _, _, commit, description_bytes, payload_bytes = _HEADER.unpack(raw)
    else:
        return None
    end = start + description_bytes + payload_bytes
    return Record(location, commit, b"", payload_bytes, end) if end <= os.fstat(fd).st_size else None


def _read(fd: int, location: Location) -> tuple[Record, bytearray]:
    """Read a record and its payload.

    Raises:
        CorruptRecord: The bytes are not those that were written, or it is cut short.
    """
    record = _header(fd, location)
    if record is None:
        raise CorruptRecord("a record is cut short")
    first = os.pread(fd, 4, location.offset) == _FIRST_MAGIC
    size = (_FIRST_HEADER if first else _HEADER).size
    raw = os.pread(fd, record.end - record.payload_bytes - location.offset, location.offset)
    header, description = raw[:size], raw[size:]
    data = bytearray(record.payload_bytes)
    view, position = memoryview(data), record.end - record.payload_bytes
    while view:
        count = os.preadv(fd, [view], position)
        if not count:
            raise CorruptRecord("a record is cut short")
        view, position = view[count:], position + count
    digest = hashlib.blake2b(b"" if first else header[20:], digest_size=16)
    digest.update(description)
    digest.update(data)
    if digest.digest() != (header[12:28] if first else header[4:20]):
        raise CorruptRecord("a record's bytes do not match its checksum")
    return replace(record, description=description), data
