"""Named points at which a test can end the process; inactive unless ``GRADWIRE_CRASH_FILE`` is in the environment."""

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
    "store.between_objects",
    "engine.before_rename",
    "engine.after_rename",
    "engine.before_reply",
    "result.before_commit",
    "result.after_commit",
    "checkpoint.before_row",
)
"""Every name with which :func:`crash_point` is called."""

_rank = 0


def set_rank(rank: int) -> None:
    """Say which rank of an engine this process is."""
    global _rank  # of the process, as its environment is
    _rank = rank


def crash_point(name: str) -> None:
    """End the process if the crash file names this point; the file is deleted, so it happens once.

    The file holds a name, how to end (``kill``, which is the default, ``stop``, ``exit`` or ``raise``), and the number
    of the rank, 0 by default.
    """
    if _FILE is None:
        return
    how = _armed(Path(_FILE), name)
    if how == "exit":
        os._exit(1)
    if how == "raise":
        raise RuntimeError(f"raised at {name}")
    if how:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def _armed(file: Path, name: str) -> str:
    """How to end at this point; empty if the file does not name it."""
    try:
        words = file.read_text().split()
        point, how, rank = (words + ["", "kill", "0"][len(words) :])[:3]
        if point != name or int(rank) != _rank:
            return ""
        file.unlink()
    except FileNotFoundError:
        return ""
    return how
