"""The interface of a store of folders, its errors, and the names of what it holds."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gradwire_server.checkpoint_files import StoredFile

T = TypeVar("T")

CHECKPOINTS, EXPORTS = "checkpoints", "exports"
PASSED = "weights.safetensors"
PASSING = "passing"
"""Owners of what is worth nothing once the server has stopped."""
IDENTITY = "gradwire.json"
"""File of a store that says whose it is."""


class StoreError(Exception):
    """The store did not do what it was asked; the message says which store, what, and what to do."""


class StoreFull(StoreError):
    """There is no room on the disk."""


class StoreUnreachable(StoreError):
    """The store does not answer now."""


class Superseded(StoreError):
    """The writer is no longer the holder of the run, and nothing was written."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a folder is.

    Attributes:
        owner: The run or upload with which it is deleted: ``runs/RUN_ID`` or ``uploads/UPLOAD_ID``.
        name: Its name there, such as ``checkpoints/step-10``.
    """

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.owner}/{self.name}"


def run_owner(run_id: str) -> str:
    """The owner of a run's folders."""
    return f"runs/{run_id}"


def saved_place(run_id: str, kind: str, name: str) -> Place:
    """The place of a run's checkpoint or export; ``kind`` is :data:`CHECKPOINTS` or :data:`EXPORTS`."""
    return Place(run_owner(run_id), f"{kind}/{name}")


def passing_place(owner: str) -> Place:
    """The place of weights that one engine hands to others; ``owner`` is ``passing/NAME``."""
    return Place(owner, "weights")


def upload_files(upload_id: str) -> Place:
    """The place of an upload's files, from when they are complete until a checkpoint was made of them."""
    return Place(f"uploads/{upload_id}", "files")


def upload_checkpoint(upload_id: str) -> Place:
    """The place of the checkpoint that was made of an upload's files."""
    return Place(f"uploads/{upload_id}", "checkpoint")


class Store(ABC):
    """Folders that exist completely or not at all. Every method may wait for a disk or a network: call it in a thread.

    All methods raise :class:`StoreError` where the store cannot be used.

    Attributes:
        threads: Threads of its own for an event loop's calls; None for the loop's.
    """

    threads: ThreadPoolExecutor | None = None

    fenced = True
    """Whether writers that were superseded are refused; else :meth:`fence` gives 0, which is never refused."""

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that uses the store in a thread: its own if it may wait for a network, beside nobody else."""
        call = partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    @abstractmethod
    def identity(self, proposed: str) -> str:
        """Name of the store: the proposed one if it had none."""

    @abstractmethod
    def fence(self, owner: str) -> int:
        """Make a new holder of an owner's folders the only one who may write them; return its number.

        Writers with an earlier number are refused from now on, also those that are writing at this moment.
        """

    @abstractmethod
    def replacing(self, place: Place, fence: int = 0) -> AbstractContextManager[Path]:
        """Provide an empty folder, which becomes that of ``place`` once the context ends without an error.

        It is durable then. An existing one stays until then.

        Args:
            fence: The writer's number by :meth:`fence`; 0 for a writer of which there is only one.

        Raises:
            Superseded: There is a newer holder.
            StoreFull: There is no room.
        """

    @abstractmethod
    def take(self, place: Place, folder: Path) -> None:
        """Take a copy of a complete folder of this machine, which is on disk already."""

    @abstractmethod
    def reading(self, place: Place, *files: str) -> AbstractContextManager[Path]:
        """Provide a folder of this machine with the content of a place, to be read only.

        Args:
            files: The files to provide, by their paths in it; none for all. One that is missing is left out.

        Raises:
            FileNotFoundError: There is no such place.
            DamagedCheckpoint: A file has changed since it was written, where the store knows; or, at the end of the
                context, the folder was replaced while it was read.
        """

    @abstractmethod
    def check(self, place: Place, file: str, stored: StoredFile) -> None:
        """Read a file where it is stored, and compare it with what was saved, byte by byte.

        Raises:
            DamagedCheckpoint: It differs.
        """

    @abstractmethod
    def sizes(self, place: Place) -> dict[str, int]:
        """Bytes of each file as it is stored, by its path in the folder; empty if there is no folder."""

    @abstractmethod
    def has(self, place: Place) -> bool:
        """Whether there is a folder, valid or not."""

    @abstractmethod
    def names(self, owner: str, kind: str) -> list[str]:
        """Names of an owner's folders of a kind, in order."""

    @abstractmethod
    def copy(self, source: Place, target: Place) -> None:
        """Copy a folder, without its bytes passing through this machine where the store can; durable when it returns.

        Raises:
            FileNotFoundError: There is no such source.
        """

    @abstractmethod
    def delete(self, place: Place) -> None:
        """Delete a folder, if it is there."""

    @abstractmethod
    def delete_all(self, owner: str) -> None:
        """Delete all folders of an owner."""

    @abstractmethod
    def inspect(self, owners: set[str], say: Callable[[str], object], *, tidy: bool = False) -> int:
        """Look for what a crash or a fault has left: say a sentence for each missing, torn or superfluous part.

        Args:
            owners: The owners that exist; folders of others are superfluous.
            tidy: Whether to delete what is superfluous.

        Returns:
            Number of sentences.
        """
