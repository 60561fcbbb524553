"""Decoding of images, as a process: ``python -m gradwire_server.image_decoding`` (see :mod:`.helper_processes`).

A file of a few kilobytes may take minutes and gigabytes to decode. The process imports nothing but Pillow.
"""

from __future__ import annotations

import base64
import warnings
from io import BytesIO

from gradwire_server.helper_processes import MEMORY_BYTES, serve
from gradwire_server.image_sizes import MAX_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP")


def decoded(content: bytes) -> tuple[dict[str, object], bytes]:
    """Decode a file, turned as it says: mode, size, palette and transparency, or a refusal; and the pixels."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(content), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MAX_PIXELS:
                return {"refused": too_large(width, height)}, b""
            image = ImageOps.exif_transpose(opened)
            image.load()
        about: dict[str, object] = {"mode": image.mode, "size": image.size}
        if image.palette is not None:
            about["palette"] = base64.b64encode(bytes(image.palette.palette)).decode()
            about["palette_mode"] = image.palette.mode
        transparency = image.info.get("transparency")
        if isinstance(transparency, bytes):
            about["transparency_bytes"] = base64.b64encode(transparency).decode()
        elif transparency is not None:
            about["transparency"] = transparency
        return about, image.tobytes()
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        return {"refused": f"its {len(content)} bytes are no {kinds} file and no array of numpy.save"}, b""
    except MemoryError:
        return {"refused": f"decoding it takes more than {MEMORY_BYTES >> 30} GiB"}, b""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return {"refused": f"the file is damaged: {error}"}, b""


def too_large(width: int, height: int) -> str:
    """Why an image of this size is refused."""
    return f"it has {width} x {height} pixels, and an image has at most {MAX_PIXELS:,}; make it smaller before sending"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(decoded)
