"""The lease of an engine on another machine than the front: it ends when it has not heard of the front for so long.

The agent writes the end of the lease into the page of marks, and the engine looks there, so that a stopped or starved
agent ends the engine as surely as a cut network. The clock counts while the machine sleeps.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from gradwire_server.engine_link.crash_marks import CrashMarks

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Longest pause in seconds between two looks at the lease."""


def now_ns() -> int:
    """The time on the lease's clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def watch(marks: CrashMarks) -> None:
    """End this process when its lease ends; do nothing if it has none."""
    if marks.lease_ns:
        threading.Thread(target=_watch, args=[marks], name="lease", daemon=True).start()


def _watch(marks: CrashMarks) -> None:
    while (left := marks.lease_ns - now_ns()) > 0:
        time.sleep(min(left / 1e9, LOOK_S))
    log.error("the server has not been heard of for the whole lease: the engine ends")
    logging.shutdown()
    os._exit(3)
