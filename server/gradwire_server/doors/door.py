"""The interface of the server's doors."""

from __future__ import annotations

from abc import ABC, abstractmethod


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
