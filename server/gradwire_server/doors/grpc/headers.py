"""Memory of calls whose headers are larger than the server allows.

gRPC enforces the limit for clients that acknowledged the server's settings. One that did not may send 16 MiB a call,
and gRPC leaves the copies that it makes for Python in a cycle of references. They are freed here, a number of bytes at
a time, instead of at the next full collection of garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from typing import Any

HEADER_BYTES = 8192
"""Headers of one call that are never refused; a client that acknowledged the settings may send twice as many."""
COLLECTED_BYTES = 48 << 20
"""Oversized headers after which garbage is collected at once."""
COLLECTED_S = 0.5
"""Seconds after which the memory of fewer is given back."""


class Oversized:
    """Counts the bytes of oversized headers, and frees them."""

    def __init__(self) -> None:
        self._bytes = 0
        self._due: asyncio.TimerHandle | None = None

    def count(self, metadata: Any) -> None:
        """Count a call's headers."""
        size = sum(len(value) for _, value in metadata)
        if size <= 2 * HEADER_BYTES:
            return
        if self._bytes >= COLLECTED_BYTES:  # those of earlier calls, which have ended
            self._bytes = 0
            gc.collect()
        self._bytes += size
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(COLLECTED_S, self._give_back)

    def _give_back(self) -> None:
        self._due, self._bytes = None, 0
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
