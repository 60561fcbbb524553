"""The end of a command with the process that started it."""

from __future__ import annotations

import asyncio
import os

CHECK_S = 0.5


async def outlived(parent: int) -> None:
    """Wait until this is no longer the parent process.

    PR_SET_PDEATHSIG fires when the parent's *thread* ends, which an SDK's may do early; so the pid is watched.
    """
    while os.getppid() == parent:  # noqa: ASYNC110  nobody sets an event when a process ends
        await asyncio.sleep(CHECK_S)
