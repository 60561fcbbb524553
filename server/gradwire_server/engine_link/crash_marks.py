"""A page of memory that front and engine share: which requests are being carried out, and which were taken back.

It outlives the engine, so the front reads after a death whose doing it may have been; and it is quicker than the
stream, in which a request that is to be taken back lies before the word that says so. 128 little-endian uint64: the
ids of requests that were begun and whose answers the front has not read, then of those taken back; 0 is free. A
request is begun or taken back, never both: each end looks at the other's half, and writes its own, under a lock that
the system lifts when its holder dies.

Nothing here needs torch: the front imports this module too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

SLOTS = 64
"""Of each kind; no more requests than that are in the engine at a time."""
_SIZE = 2 * SLOTS * 8


class CrashMarks:
    """The page.

    Args:
        fd: of the shared memory; the object's own from now on. None makes a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("gradwire-marks")
            os.ftruncate(fd, _SIZE)
        self.fd = fd
        self._page = mmap.mmap(fd, _SIZE)
        slots = memoryview(self._page).cast("Q")
        self._begun, self._withdrawn = slots[:SLOTS], slots[SLOTS:]

    def begin(self, request_id: int) -> bool:
        """The engine, before it carries a request out; False when that was taken back and is not to be.

        Where no slot is free it waits until the front has read an answer: a request that was left out for that would
        be missed by those behind it.
        """
        while True:
            with self._locked():
                if request_id in self._withdrawn:
                    return False
                if _replace(self._begun, 0, request_id):
                    return True
            time.sleep(0.001)

    def withdraw(self, request_id: int) -> bool:
        """The front takes back a request whose answer it has not read; False when it was begun already."""
        with self._locked():
            return request_id not in self._begun and _replace(self._withdrawn, 0, request_id)

    def answered(self, request_id: int) -> None:
        """The front has read the answer."""
        _replace(self._begun, request_id, 0)
        _replace(self._withdrawn, request_id, 0)

    @property
    def begun(self) -> set[int]:
        """The requests that are being carried out, or were when the engine died."""
        return set(self._begun) - {0}

    def close(self) -> None:
        self._begun.release()
        self._withdrawn.release()
        os.close(self.fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)


def _replace(slots: memoryview, old: int, new: int) -> bool:
    """Writes over the first slot of this content; False when there is none."""
    for index, value in enumerate(slots):
        if value == old:
            slots[index] = new
            return True
    return False
