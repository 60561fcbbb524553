"""The end of an engine's process with the one that started it. Imports nothing that takes time."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, and end it if that was before this call.

    Called before the imports: with them a process could start to compute long after its parent had gone.

    Args:
        parent: The parent's process id, as the parent said it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
