"""Count what a protobuf message holds before objects are made of it.

Two bytes can be a message of their own, for which a parser makes an object: 8 MiB of them take a second and 150 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

SLICE_FIELDS = 1024
"""Fields counted before the event loop has its turn: a millisecond."""
SMALL_BYTES = 32 << 10
"""Messages up to this size are parsed uncounted: they hold 16,384 fields at most, which take a few milliseconds."""
VARINT, LENGTH, INVALID = 0, 2, -1
SIZES = {1: 8, 3: 0, 4: 0, 5: 4}
"""Bytes of a field after its tag, by wire type: of fixed numbers, and of the ends of groups."""


class TooManyFieldsError(Exception):
    """A message has more fields than its reader takes."""


class TooLargeFieldsError(Exception):
    """The fields that a reader takes whole have too many bytes, or are too many."""


async def check_fields(data: bytes, descriptor: Descriptor, limit: int) -> None:
    """Check how many fields a message has, those of messages inside it included, and serve others meanwhile.

    Raises:
        TooManyFieldsError: More than the limit.
        DecodeError: It is no message.
    """
    if len(data) <= SMALL_BYTES:
        return
    for _ in counted(data, descriptor, limit):
        await asyncio.sleep(0)


def counted(data: bytes, descriptor: Descriptor, limit: int) -> Iterator[None]:
    """Count fields like :func:`check_fields`, in steps."""
    left, inside = limit, [(_messages(descriptor), 0, len(data))]
    while inside:
        messages, place, end = inside.pop()
        while place < end:
            left -= 1
            if left < 0:
                raise TooManyFieldsError
            if not left % SLICE_FIELDS:
                yield
            tag = data[place]
            place += 1
            if tag >= 0x80:
                tag, place = _varint(data, place - 1, end)
            kind = tag & 7 if tag > 7 else INVALID
            if kind in SIZES:
                place += SIZES[kind]
            elif kind == LENGTH:
                size, place = _varint(data, place, end)
                if (message := messages.get(tag >> 3)) is not None and size:
                    inside.append((_messages(message), place, min(place + size, end)))
                place += size
            elif kind == VARINT:
                _, place = _varint(data, place, end)
            else:
                raise DecodeError(f"wire type {kind}")
        if place > end:
            raise DecodeError("it ends too early")


async def without(data: bytes, number: int, most: int, others: int, other_bytes: int) -> bytes:
    """A message without one of its fields, which may be repeated.

    Args:
        most: Entries that the field may have.
        others: Further fields that the message may have.
        other_bytes: Bytes of them.

    Raises:
        TooManyFieldsError: More than that.
        TooLargeFieldsError: More than that of further fields.
        DecodeError: It is no message.
    """
    place, end, kept = 0, len(data), bytearray()
    while place < end:
        start = place
        tag, place = _varint(data, place, end)
        kind = tag & 7 if tag > 7 else INVALID
        if kind in SIZES:
            place += SIZES[kind]
        elif kind in (LENGTH, VARINT):
            size, place = _varint(data, place, end)
            place += size if kind == LENGTH else 0
        else:
            raise DecodeError(f"wire type {kind}")
        if tag >> 3 == number:
            most -= 1
            if not most % SLICE_FIELDS:
                await asyncio.sleep(0)
        else:
            others -= 1
            if others < 0 or len(kept) + place - start > other_bytes:
                raise TooLargeFieldsError
            kept += data[start:place]
        if most < 0:
            raise TooManyFieldsError
    if place > end:
        raise DecodeError("it ends too early")
    return bytes(kept)


@cache
def _messages(descriptor: Descriptor) -> dict[int, Descriptor]:
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None
    }


def _varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    if place < end and (byte := data[place]) < 0x80:
        return byte, place + 1
    value = shift = 0
    while place < end and shift < 70:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise DecodeError("a number ends too early or is too long")
