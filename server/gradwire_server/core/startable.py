"""The base of objects that are started and stopped, and used as async context managers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Startable(ABC):
    """A part with a start and a stop. ``async with`` starts it, and stops it also if the start fails."""

    @abstractmethod
    async def start(self) -> None:
        """Start."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop, also when not completely started. A second call does nothing."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
