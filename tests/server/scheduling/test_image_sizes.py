"""Sizes of images by their headers agree with Pillow's."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from gradwire_server.image_sizes import HEADER_BYTES, MAX_PIXELS, pixels
from PIL import Image


def made(kind: str, width: int, height: int) -> bytes:
    stream = BytesIO()
    image = Image.new("RGB", (width, height))
    if kind == "array":
        np.save(stream, np.zeros((height, width, 3), np.uint8))
    elif kind == "photograph":
        image.save(stream, "JPEG", icc_profile=b"\0" * 200_000, exif=Image.Exif().tobytes())
    elif kind == "webp extended":
        image.save(stream, "WEBP", exif=Image.Exif().tobytes(), icc_profile=b"\0" * 100)
    else:
        image.save(
            stream, kind.split()[0], lossless=kind.endswith("lossless"), progressive=kind.endswith("progressive")
        )
    return stream.getvalue()


@pytest.mark.parametrize(
    "kind",
    ["PNG", "JPEG", "JPEG progressive", "photograph", "WEBP", "WEBP lossless", "webp extended", "array"],
)
def test_the_size_is_read_from_the_header(kind: str) -> None:
    content, asked = made(kind, 300, 7), []
    assert pixels(lambda size: (asked.append(size), content[:size])[1]) == 2100
    assert asked == list(HEADER_BYTES[: 2 if kind == "photograph" else 1])


@pytest.mark.parametrize("content", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\0\0" * 9, b"\x93NUMPY\1\0\5\0[[[[[", b"RIFF"])
def test_what_does_not_say_counts_as_the_largest(content: bytes) -> None:
    assert pixels(lambda size: content[:size]) == MAX_PIXELS
