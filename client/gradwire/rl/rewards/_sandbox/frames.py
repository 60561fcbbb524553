"""Messages on a pipe: 4 bytes of length, little-endian, then the content."""

from __future__ import annotations

import os
import struct


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> bytes:
    return read_exactly(fd, struct.unpack("<I", read_exactly(fd, 4))[0])


def write_frame(fd: int, content: bytes) -> None:
    view = memoryview(struct.pack("<I", len(content)) + content)
    while view:
        view = view[os.write(fd, view) :]
