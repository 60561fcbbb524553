"""Images of rows and of prompts on the wire: each distinct one once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column

from gradwire.errors import InvalidBatchError, type_of

Image = bytes | npt.NDArray[np.uint8] | Any
"""The bytes of a PNG, JPEG or WebP file; a uint8 array ``[height, width]`` or ``[height, width, channels]``; or an
image of Pillow, whose type this module does not import."""


def to_image_columns(images: Any, rows: int) -> dict[str, Column]:
    """Build the columns of a batch's images; none if no row has an image.

    Args:
        images: A list of images for each row; None for a row without.
        rows: Number of rows.

    Raises:
        InvalidBatchError: Names the row.
    """
    numbers, distinct = numbered(images, rows)
    if not distinct:
        return {}
    contents = [np.frombuffer(content, np.uint8) for content in distinct]
    return {
        IMAGES: Column.from_rows([np.array(row, np.int32) for row in numbers]),
        IMAGE_BYTES: Column.from_rows(contents),
    }


def numbered(images: Any, rows: int) -> tuple[list[list[int]], list[bytes]]:
    """Return each row's images as indices into the distinct ones, and those; as for :func:`to_image_columns`."""
    if isinstance(images, str | bytes | np.ndarray) or not isinstance(images, Sequence):
        raise _error(f"is a list with a list of images for each row, not {type_of(images)}", None)
    if len(images) != rows:
        raise _error(f"has {len(images)} rows, and there are {rows}", None)
    numbers: list[list[int]] = []
    distinct: dict[bytes, int] = {}
    contents: list[bytes] = []
    for row, own in enumerate(images):
        if own is None:
            own = []
        if isinstance(own, str | bytes | np.ndarray) or not isinstance(own, Sequence):
            raise _error(f"holds {type_of(own)} where a list of images is expected", row)
        numbers.append([])
        for place, image in enumerate(own):
            content = _content(image, row, place)
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest not in distinct:
                distinct[digest] = len(contents)
                contents.append(content)
            numbers[-1].append(distinct[digest])
    return numbers, contents


def _content(image: Image, row: int, place: int) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        if not len(image):
            raise _error(f"image {place} is empty", row)
        return bytes(image)
    stream = BytesIO()
    if callable(getattr(image, "save", None)) and hasattr(image, "getbands"):  # Pillow's, without importing it so far
        from PIL import ImageOps

        turned = ImageOps.exif_transpose(cast(Any, image))  # as the server turns the same image that is sent as a file
        turned.save(stream, format="PNG")
        return stream.getvalue()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))):
            raise _error(
                f"image {place} is an array of {image.dtype} {list(image.shape)}; an image is uint8 [height, width], or"
                " [height, width, channels] with 1, 3 or 4 channels",
                row,
            )
        np.save(stream, np.ascontiguousarray(image), allow_pickle=False)
        return stream.getvalue()
    hint = "; nothing is fetched for you: read the file and send its bytes" if isinstance(image, str | PurePath) else ""
    raise _error(
        f"image {place} is {type_of(image)}; an image is the bytes of a PNG, JPEG or WebP file, a uint8 array,"
        f" or a Pillow image{hint}",
        row,
    )


def _error(problem: str, row: int | None) -> InvalidBatchError:
    where = IMAGES if row is None else f"{IMAGES}, row {row}"
    return InvalidBatchError(f"{where} {problem}" if row is None else f"{where}: {problem}",
                             field=IMAGES, row=row, rule="a list of images for each row")  # fmt: skip
