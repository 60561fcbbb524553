"""Guards against using a connection in another process, after a fork or by pickle."""

from __future__ import annotations

import os
from typing import Any

from gradwire.errors import InvalidRequestError

_FORKED = (
    "this process was forked from one that has a connection, and gRPC does not work on either side of a fork: start "
    'processes by multiprocessing.get_context("spawn"), or connect only after the fork'
)


class _Process:
    """This process: whether it has used gRPC, and whether it was forked from one that had."""

    def __init__(self) -> None:
        self.has_connected = False
        self.is_spoiled = False

    def forked(self) -> None:
        self.is_spoiled = self.is_spoiled or self.has_connected


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forked)


def check_not_forked() -> None:
    """Check that gRPC works in this process.

    Raises:
        InvalidRequestError: The process was forked from one that had a connection; any call would crash or hang.
    """
    if _PROCESS.is_spoiled:
        raise InvalidRequestError(_FORKED)


def note_connection() -> None:
    """Check as :func:`check_not_forked` does, and remember that this process uses gRPC."""
    check_not_forked()
    _PROCESS.has_connected = True


class Connected:
    """Base of the objects that hold a connection and so cannot be pickled or copied.

    Attributes:
        elsewhere: Advice for another process, in the error.
    """

    elsewhere = "connect there"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} holds a connection and cannot be pickled: {self.elsewhere}")
