"""Decoding of images in processes that are ended if one takes too long."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from gradwire_server.helper_processes import Helpers, Told

if TYPE_CHECKING:
    from PIL.Image import Image

DECODE_S = 20.0
"""Seconds that one image may take; 16 megapixels take two at most."""
PROCESSES = 2
_HELPERS = Helpers("gradwire_server.image_decoding", PROCESSES)


class ImageRefused(ValueError):
    """An image, or a row with images, cannot be taken; the message says why."""


def decode(content: bytes) -> Image:
    """Decode a PNG, JPEG or WebP file, turned as it says. Thread-safe.

    Raises:
        ImageRefused: It is not an image, it is damaged, or it takes too many pixels, too long or too much memory.
    """
    try:
        about, pixels = _HELPERS.ask(content, DECODE_S)
    except TimeoutError:
        raise ImageRefused(f"decoding it took more than {DECODE_S:g} s") from None
    except EOFError:
        raise ImageRefused("the process that decoded it ended; is it damaged?") from None
    if "refused" in about:
        raise ImageRefused(about["refused"])
    return _image(about, pixels)


def _image(about: Told, pixels: bytearray) -> Image:
    from PIL import Image

    image = Image.frombytes(about["mode"], tuple(about["size"]), bytes(pixels))
    if "palette" in about:
        image.putpalette(base64.b64decode(about["palette"]), about["palette_mode"])
    if "transparency" in about:
        given = about["transparency"]
        image.info["transparency"] = tuple(given) if isinstance(given, list) else given
    if "transparency_bytes" in about:
        image.info["transparency"] = base64.b64decode(about["transparency_bytes"])
    return image
