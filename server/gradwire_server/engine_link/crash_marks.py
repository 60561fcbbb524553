"""A page of shared memory in which front and engine mark requests as started, withdrawn or to be stopped.

The page survives the engine, so after a crash the front can read which requests may have caused it. It also lets the
front withdraw a request in time: in the stream, a withdrawal would arrive after the request itself.

The page holds three times ``SLOTS`` little-endian uint64, 0 for a free slot: first the ids of the requests that the
engine has started and whose answers the front has not read, then the ids of those that the front has withdrawn, then of
those that the engine is to stop between two micro-batches or tokens. A request is started or withdrawn, never both:
each side checks the other's part and writes its own under one file lock, which the system releases if its holder dies.
One more uint64 is the end of the engine's lease, 0 for an engine without one (:mod:`.lease`). On another machine than
the front's, the front's part is an agent's.

A mark costs both ends 5 microseconds of processor time; a message that a request begins would cost 80, and two
switches between the processes. This module needs no torch, because the front imports it
too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Sequence

SLOTS = 256
"""Slots per part of the page; at most this many requests are in the engine at a time."""
_SIZE = (3 * SLOTS + 1) * 8
_NOTHING = bytes(SLOTS * 8)
_STOPPED_AT = 2 * SLOTS * 8


class CrashMarks:
    """The shared page; a context manager that locks it.

    Args:
        fd: File descriptor of the shared memory, which :meth:`close` closes; None to allocate a new page.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("gradwire-marks")
            os.ftruncate(fd, _SIZE)
        self.fd = fd
        self._page = mmap.mmap(fd, _SIZE)
        slots = memoryview(self._page).cast("Q")
        self._begun, self._withdrawn, self._stopped = (slots[n * SLOTS : (n + 1) * SLOTS] for n in range(3))
        self._lease = slots[3 * SLOTS :]
        self._marked: set[int] = set()

    def begin(self, request_ids: Sequence[int]) -> list[bool]:
        """Mark requests as started, the first and the others as far as slots are free; called by the engine.

        If no slot is free for the first, wait until the front has read an answer: the request cannot be skipped, as
        later ones depend on it.

        Returns:
            For each request up to the first without a slot, whether it is started; False if the front has withdrawn it.
        """
        started: list[bool] = []
        while len(started) < min(1, len(request_ids)):
            with self:
                for request_id in request_ids:
                    withdrawn = request_id in self._withdrawn
                    if not withdrawn and not _replace(self._begun, 0, request_id):
                        break
                    started.append(not withdrawn)
            if not started:
                time.sleep(0.001)
        return started

    def withdraw(self, request_id: int) -> bool:
        """Withdraw a request; called by the front. False if the engine has started it or no slot is free."""
        self._marked.add(request_id)
        with self:
            return request_id not in self._begun and _replace(self._withdrawn, 0, request_id)

    def stop(self, request_id: int) -> bool:
        """Ask the engine to stop a request; called by the front. False if no slot is free."""
        self._marked.add(request_id)
        return request_id in self._stopped or _replace(self._stopped, 0, request_id)

    def stops(self, request_id: int) -> bool:
        """Whether the front has asked to stop a request; called by the engine."""
        return self._page[_STOPPED_AT : _STOPPED_AT + len(_NOTHING)] != _NOTHING and request_id in self._stopped

    def answered(self, request_id: int) -> None:
        """Free the slot of a request; called by the front once it has read the answer."""
        _replace(self._begun, request_id, 0)
        if request_id in self._marked:  # by this end, as only the front withdraws and stops
            self._marked.discard(request_id)
            _replace(self._withdrawn, request_id, 0)
            _replace(self._stopped, request_id, 0)

    @property
    def lease_ns(self) -> int:
        """The end of the engine's lease on the clock ``CLOCK_BOOTTIME`` of the machine, in ns; 0 if it has none."""
        return int(self._lease[0])

    @lease_ns.setter
    def lease_ns(self, end: int) -> None:
        self._lease[0] = end

    @property
    def begun(self) -> set[int]:
        """Ids of the requests that are being executed, or were when the engine died."""
        return set(self._begun) - {0}

    def close(self) -> None:
        """Release the page and close its file descriptor."""
        self._begun.release()
        self._withdrawn.release()
        self._stopped.release()
        self._lease.release()
        os.close(self.fd)

    def __enter__(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN)


def _replace(slots: memoryview, old: int, new: int) -> bool:
    """Overwrite the first slot that holds ``old`` with ``new``; False if there is none."""
    for index, value in enumerate(slots):
        if value == old:
            slots[index] = new
            return True
    return False
