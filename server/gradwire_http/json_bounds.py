"""Count the values of a JSON text before objects are made of them.

A parser makes an object of every value, and a validator an error of every wrong one: a small text, compressed, can cost
seconds and gigabytes. Counting costs a hundredth of that, in slices between which others are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SLICE_BYTES = 64 << 10
"""Bytes counted before the event loop has its turn: half a millisecond."""
COMMA, COLON, QUOTE = ord(","), ord(":"), ord('"')


class UnboundedJsonError(ValueError):
    """A JSON text has more of something than its reader takes.

    Attributes:
        what: ``values``, ``containers`` or ``levels``; empty for a text that is not in UTF-8.
        limit: How many there may be.
    """

    def __init__(self, what: str, limit: int) -> None:
        text = f"it has more than {limit:,} {what}" if what else "it is not JSON in UTF-8"
        super().__init__(f"it is nested too deep: {text}" if what == "levels" else text)
        self.what, self.limit = what, limit


@dataclass(frozen=True)
class JsonBounds:
    """The most that a JSON text may hold.

    Attributes:
        values: Values, those in lists and objects included.
        containers: Lists, objects and keys of objects: what takes most to make.
        levels: Lists and objects inside each other.
    """

    values: int
    containers: int
    levels: int = 64

    async def check(self, text: bytes) -> None:
        """Check a text, and serve others meanwhile.

        Raises:
            UnboundedJsonError: It holds more.
        """
        for _ in self.counted(text):
            await asyncio.sleep(0)

    def counted(self, text: bytes) -> Iterator[None]:
        """Count a text; each step is a slice of it. Whatever precedes the first mistake of a broken text is counted as
        a parser reads it.

        Raises:
            UnboundedJsonError: It holds more.
        """
        if b"\0" in text[:4] or text[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UnboundedJsonError("", 0)  # parsers read UTF-16 and UTF-32 too, whose bytes mean something else
        if len(text) <= min(self.values, self.containers) and text.count(b"[") + text.count(b"{") <= self.levels:
            return
        values = containers = level = 0
        inside = escaped = False
        for start in range(0, len(text), SLICE_BYTES):
            part = text[start + escaped : start + SLICE_BYTES]
            part, escaped = _unescaped(part)
            if not part:
                yield
                continue
            chars = np.frombuffer(part, np.uint8)
            in_text = (np.cumsum(chars == QUOTE) + inside) & 1
            inside = bool(in_text[-1])
            structure = np.where(in_text, 0, chars)
            opened = (structure == ord("[")) | (structure == ord("{"))
            closed = (structure == ord("]")) | (structure == ord("}"))
            containers += int(opened.sum()) + int((structure == COLON).sum())
            values += int(opened.sum()) + int((structure == COMMA).sum())
            levels = level + np.cumsum(opened.astype(np.int64) - closed)
            level = int(levels[-1])
            for what, count, limit in (
                ("levels", int(levels.max()), self.levels),
                ("containers", containers, self.containers),
                ("values", values, self.values),
            ):
                if count > limit:
                    raise UnboundedJsonError(what, limit)
            yield


def _unescaped(part: bytes) -> tuple[bytes, bool]:
    """A part of a text without its escaped quotes, and whether its last character escapes the next part's first."""
    if b"\\" not in part:
        return part, False
    odd = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
    whole = part[:-1] if odd else part
    return whole.replace(b"\\\\", b"").replace(b'\\"', b""), odd
