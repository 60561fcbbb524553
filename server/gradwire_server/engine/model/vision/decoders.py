"""Decoding of images in processes that are ended if one takes too long."""

from __future__ import annotations

import base64
import json
import logging
import selectors
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from gradwire_server.image_decoding import LENGTH

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

DECODE_S = 20.0
"""Seconds that one image may take; 16 megapixels take two at most."""
PROCESSES = 2
_BLOCK = 1 << 20


class ImageRefused(ValueError):
    """An image, or a row with images, cannot be taken; the message says why."""


class _Decoder:
    """One process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "gradwire_server.image_decoding"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def decode(self, content: bytes) -> tuple[dict[str, Any], bytearray]:
        """Decode a file.

        Raises:
            TimeoutError: It took too long.
            EOFError: The process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(LENGTH.pack(len(content)))
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError from error
        until = time.monotonic() + DECODE_S
        header = self._read(LENGTH.unpack(self._read(LENGTH.size, until))[0], until)
        return json.loads(header), self._read(LENGTH.unpack(self._read(LENGTH.size, until))[0], until)

    def _read(self, size: int, until: float) -> bytearray:
        assert self._process.stdout is not None
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                raise TimeoutError
            count = self._process.stdout.raw.readinto(view[:_BLOCK])  # type: ignore[attr-defined]  # a BufferedReader
            if not count:
                raise EOFError
            view = view[count:]
        return data

    def end(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what was not sent any more
                continue


class Decoders:
    """Up to :data:`PROCESSES` processes, started when they are needed; they end with this process. Thread-safe."""

    def __init__(self) -> None:
        self._turns = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[_Decoder] = []

    def decode(self, content: bytes) -> Image:
        """Decode a PNG, JPEG or WebP file, turned as it says.

        Raises:
            ImageRefused: It is none, it is damaged, or it takes too many pixels, too long or too much memory.
        """
        with self._turns:
            decoder = self._idle.pop() if self._idle else _Decoder()
            try:
                about, pixels = decoder.decode(content)
            except BaseException as error:
                decoder.end()
                if isinstance(error, TimeoutError):
                    raise ImageRefused(f"decoding it took more than {DECODE_S:g} s") from None
                if isinstance(error, EOFError):
                    raise ImageRefused("the process that decoded it ended; is it damaged?") from None
                raise
            self._idle.append(decoder)
        if "refused" in about:
            raise ImageRefused(about["refused"])
        return _image(about, pixels)


def _image(about: dict[str, Any], pixels: bytearray) -> Image:
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


DECODERS = Decoders()
"""Those of this process."""
