"""The doors of a server, in one list, and what the server asks of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from gradwire_server.core.core import Core


class Door(ABC):
    """A protocol's way to a started core: see ``doors/__init__.py``.

    Attributes:
        address: Where it listens, once it is open; empty before.
    """

    address: str = ""

    @abstractmethod
    async def open(self) -> None:
        """Listen on the configured address.

        Raises:
            SystemExit: The address cannot be used; with a message.
        """

    @abstractmethod
    async def announce_end(self) -> None:
        """Say to those who ask that the server is about to stop; operations go on until the core is drained."""

    @abstractmethod
    async def close(self) -> None:
        """Accept nothing more, and end what still waits. A second call does nothing."""


def _grpc(core: Core) -> Door:
    from gradwire_server.doors.grpc.door import GrpcDoor

    return GrpcDoor(core)


def _http(core: Core) -> Door | None:
    if not core.config.http:
        return None
    from gradwire_server.doors.http.door import HttpDoor  # FastAPI is in an extra of its own

    return HttpDoor(core)


DOORS: Mapping[str, Callable[[Core], Door | None]] = {"http": _http, "grpc": _grpc}
"""Each door's name, and how it is made in front of a core; None if the settings leave it out. They open in this order,
and close in the reverse."""
