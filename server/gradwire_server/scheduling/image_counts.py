"""Pixels of the images of an operation, counted by the images' headers in its payload."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.image_sizes import pixels
from gradwire_server.journal.segments import Buffer

CHUNKS_OF_HEADER = 3
"""Chunks in which an image's header is; chunks are larger than headers, but for the last one of a frame."""


def pixels_of_batch(header: pb.OperationHeader, chunks: Sequence[Buffer]) -> list[int]:
    """Pixels of each image of a batch, by the headers of the images."""
    offset = 0
    for spec in header.tensors:
        sizes = spec.level_sizes
        if spec.name == codec.IMAGE_BYTES and len(sizes) == 1:
            lengths = np.frombuffer(cut(chunks, offset, offset + 4 * sizes[0]), "<u4")
            return _pixels(chunks, offset + 4 * sizes[0], lengths.tolist())
        offset += codec.spec_bytes(spec)
    return []


def pixels_of_images(images: Iterable[bytes]) -> list[int]:
    """Pixels of each image by its header."""
    return [pixels(partial(_beginning, [image], 0, len(image))) for image in images]


def _pixels(chunks: Sequence[Buffer], begin: int, lengths: Sequence[int]) -> list[int]:
    """Pixels of images whose contents follow each other in a payload from ``begin`` on."""
    starts = [0, *accumulate(map(len, chunks))]
    counts = []
    for length in lengths:
        first = bisect_right(starts, begin) - 1
        near, at = chunks[first : first + CHUNKS_OF_HEADER], begin - starts[first]
        counts.append(pixels(partial(_beginning, near, at, length)))
        begin += length
    return counts


def _beginning(chunks: Sequence[Buffer], begin: int, length: int, size: int) -> bytes:
    return cut(chunks, begin, begin + min(length, size))


def cut(chunks: Sequence[Buffer], begin: int, end: int) -> bytes:
    """These bytes of a payload."""
    parts, at = list[Buffer](), 0
    for chunk in chunks:
        if at >= end:
            break
        parts.append(chunk[max(begin - at, 0) : max(end - at, 0)])
        at += len(chunk)
    return b"".join(parts)
