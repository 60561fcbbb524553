"""Bodies of requests: read within a limit, decompressed within the same limit, and JSON counted before it is parsed."""

from __future__ import annotations

import asyncio
import io
import zlib
from dataclasses import dataclass, replace

import zstandard
from gradwire_http.json_bounds import JsonBounds, UnboundedJsonError
from gradwire_http.request_headers import PROTOBUF

from gradwire_server.errors import ServiceError, invalid, limit_exceeded
from gradwire_server.limits import Limits

READ_BYTES = 1 << 20
ZSTD_STEP_BYTES = 512
"""Compressed bytes decoded at once: 4 of them can become 128 KiB."""
IN_LOOP_BYTES = 256 << 10
"""Bodies that are larger, compressed or not, are decompressed in a thread, so that other requests go on."""
MAX_LEVELS = 64
"""Lists and objects inside each other in JSON."""
MAX_WINDOW_BYTES = 128 << 20
"""The largest window of a zstd frame: what a decoder may be made to allocate."""
BEGINNING_BYTES = 256 << 10
"""First bytes kept of a body above its limit: more than a first block of zstd can take."""
FORM_BYTES = 64 << 10
"""Limit of the other fields of a form with a file, together."""
ENCODINGS = ("", "identity", "gzip", "zstd")


@dataclass(frozen=True)
class BodyLimit:
    """The most bytes that a body may have, and the name of that limit."""

    bytes: int
    name: str

    @staticmethod
    def of(limits: Limits, media_type: str) -> BodyLimit:
        """The limit of a body of this type: of JSON, unless it is protobuf."""
        if media_type == PROTOBUF or limits.max_http_body_bytes <= limits.max_json_body_bytes:
            return BodyLimit(limits.max_http_body_bytes, "max_http_body_bytes")
        return BodyLimit(limits.max_json_body_bytes, "max_json_body_bytes")

    def exceeded(self, size: str) -> ServiceError:
        """LIMIT_EXCEEDED for a body of this size."""
        return limit_exceeded(f"a body of {size} bytes", self.name, self.bytes, "body")

    def check(self, size: int) -> None:
        """Check what has come so far."""
        if size > self.bytes:
            raise self.exceeded(f"more than {self.bytes}")


class OversizedBodyError(Exception):
    """A body is above its limit.

    Attributes:
        reason: LIMIT_EXCEEDED.
        beginning: The first bytes of the body, decompressed; empty if they were not received or are damaged.
    """

    def __init__(self, reason: ServiceError, received: bytes, encoding: str) -> None:
        super().__init__(reason.error.message)
        self.reason, self.beginning = reason, _beginning(received, encoding)


def unknown_encoding(encoding: str) -> ServiceError:
    """INVALID_ARGUMENT for a Content-Encoding that is not served."""
    message = f"Content-Encoding {encoding[:50]!r} is not served; send gzip, zstd or neither"
    return invalid(message, "Content-Encoding")


async def decompressed(body: bytes, encoding: str, limit: BodyLimit) -> bytes:
    """Decompress a body.

    Raises:
        ServiceError: INVALID_ARGUMENT for a body that is not in this encoding.
        OversizedBodyError: It becomes larger than the limit; no more than that is ever in memory.
    """
    if encoding in ("", "identity"):
        return body
    decode = _unzstd if encoding == "zstd" else _gunzip
    try:
        if len(body) <= IN_LOOP_BYTES < limit.bytes:
            try:
                return decode(body, replace(limit, bytes=IN_LOOP_BYTES))
            except ServiceError:  # it becomes larger
                return await asyncio.to_thread(decode, body, limit)
        return await asyncio.to_thread(decode, body, limit)
    except ServiceError as error:
        raise OversizedBodyError(error, body[:BEGINNING_BYTES], encoding) from None
    except (zstandard.ZstdError, zlib.error, EOFError) as error:
        raise invalid(f"the body is not {encoding}: {error}", "Content-Encoding") from error


async def check_json(body: bytes, limits: Limits) -> None:
    """Check how many values JSON has before objects are made of them."""
    bounds = JsonBounds(limits.max_json_values, limits.max_json_containers, MAX_LEVELS)
    try:
        await bounds.check(body)
    except UnboundedJsonError as error:
        if error.what in ("values", "containers"):
            what = f"a body of JSON with more {error.what}"
            raise limit_exceeded(what, f"max_json_{error.what}", error.limit, "body") from None
        raise invalid(f"the body cannot be read: {error}", "body") from None


def _unzstd(body: bytes, limit: BodyLimit) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    view, whole = memoryview(body), io.BytesIO()
    for start in range(0, len(view), ZSTD_STEP_BYTES):
        if decoder.eof:
            break
        whole.write(decoder.decompress(view[start : start + ZSTD_STEP_BYTES]))
        limit.check(whole.tell())
    if not decoder.eof:
        raise EOFError("it ends too early")
    return whole.getvalue()


def _gunzip(body: bytes, limit: BodyLimit) -> bytes:
    decoder = zlib.decompressobj(wbits=31)
    whole, view = io.BytesIO(), memoryview(body)
    for start in range(0, len(view), READ_BYTES):
        rest: bytes | memoryview = view[start : start + READ_BYTES]
        while rest and not decoder.eof:  # what is left over is copied, so it is a part of the body at most
            whole.write(decoder.decompress(rest, READ_BYTES))
            rest = decoder.unconsumed_tail
            limit.check(whole.tell())
    if not decoder.eof:
        raise EOFError("it ends too early")
    return whole.getvalue()


def _beginning(received: bytes, encoding: str) -> bytes:
    try:
        if encoding == "gzip":
            return zlib.decompressobj(wbits=31).decompress(received, BEGINNING_BYTES)
        if encoding == "zstd":
            decoder, content = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj(), b""
            for start in range(0, len(received), ZSTD_STEP_BYTES):
                if content or decoder.eof:
                    break
                content = decoder.decompress(received[start : start + ZSTD_STEP_BYTES])
            return content
    except (zstandard.ZstdError, zlib.error):
        return b""
    return received
