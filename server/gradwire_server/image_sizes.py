"""Sizes of images by their headers: what decoding them will cost, known before anything is decoded."""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable

HEADER_BYTES = (1 << 10, 1 << 20)
"""Bytes of an image that are read for its size: at first, and for one such as a photograph with a preview."""
MAX_PIXELS = 1 << 24
"""Maximum pixels of an image, which models shrink to fewer; a small file may hold many more."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of a frame, which has the size."""


def pixels(beginning: Callable[[int], bytes]) -> int:
    """Pixels of an image by its beginning; :data:`MAX_PIXELS` where that does not say.

    Args:
        beginning: Returns so many first bytes of a PNG, JPEG or WebP file, or of an array of ``numpy.save``.
    """
    for size in HEADER_BYTES:
        try:
            width, height = _size(beginning(size))
        except (struct.error, ValueError, SyntaxError, IndexError, KeyError, TypeError, MemoryError, RecursionError):
            continue
        return max(0, width) * max(0, height)
    return MAX_PIXELS


def _size(header: bytes) -> tuple[int, int]:
    if header.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", header, 16)
        return width, height
    if header.startswith(b"\xff\xd8"):
        return _jpeg(header)
    if header.startswith(b"RIFF") and header[8:12] == b"WEBP":
        return _webp(header)
    if header.startswith(b"\x93NUMPY"):
        (length,) = struct.unpack_from("<H", header, 8)
        shape = ast.literal_eval(header[10 : 10 + min(length, 1024)].decode("latin-1").strip())["shape"]
        return int(shape[1]), int(shape[0])
    raise ValueError("no image")


def _jpeg(header: bytes) -> tuple[int, int]:
    at = 2
    while True:
        marker, length = struct.unpack_from(">HH", header, at)
        if marker >> 8 != 0xFF:
            raise ValueError("no marker")
        if marker & 0xFF in _FRAMES:
            height, width = struct.unpack_from(">HH", header, at + 5)
            return width, height
        at += 2 + length


def _webp(header: bytes) -> tuple[int, int]:
    kind = header[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(header[24:27], "little"), 1 + int.from_bytes(header[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", header, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", header, 26)
    return width & 0x3FFF, height & 0x3FFF
