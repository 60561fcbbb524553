"""Named points at which a test can kill the process; inactive unless ``GRADWIRE_CRASH_FILE`` is in the environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_FILE = os.environ.get("GRADWIRE_CRASH_FILE")

POINTS = (
    "operation.before_commit",
    "operation.before_ack",
    "operation.before_engine",
    "engine.before_operation",
    "engine.inside_optim_step",
    "engine.inside_checkpoint",
    "engine.before_rename",
    "engine.after_rename",
    "engine.before_reply",
    "result.before_commit",
    "result.after_commit",
    "checkpoint.before_row",
)
"""Every name with which :func:`crash_point` is called."""


def crash_point(name: str) -> None:
    """Kill the process with SIGKILL if the crash file holds this name; the file is deleted, so it happens once."""
    if _FILE is not None and _armed(Path(_FILE), name):
        os.kill(os.getpid(), signal.SIGKILL)


def _armed(file: Path, name: str) -> bool:
    try:
        if file.read_text().strip() != name:
            return False
        file.unlink()
    except FileNotFoundError:
        return False
    return True
