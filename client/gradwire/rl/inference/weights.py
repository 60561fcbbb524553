"""How weights reach an inference module: exported by the run into a folder, and loaded from there."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

ADAPTER_FILE = "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether an exported folder holds a PEFT adapter, not a whole model."""
    return (folder / ADAPTER_FILE).exists()


class WeightFolder(ABC):
    """Gives an inference module :meth:`update_weights` by way of a folder.

    The last two versions stay on disk: a backend may read an adapter again for requests that were sent before the
    newest one came.

    Attributes:
        version: optimizer steps of the policy whose weights are loaded.
        weights_folder: where to export to; None: a temporary folder. A server elsewhere must see it under this name.
    """

    version: int = 0
    weights_folder: Path | None = None
    _place: Path | None = None
    _kept: tuple[Path, ...] = ()

    def can_update(self, run: Any) -> bool:
        return hasattr(run, "export")

    async def update_weights(self, run: Any, version: int) -> None:
        """Loads the weights that the run has after the operations submitted so far.

        Args:
            run: a ``TrainingClient``.
            version: its optimizer steps by then.
        """
        folder = self._new_folder(version)
        try:
            await run.export(folder)
            await self.load_weights(folder, version)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        kept = (*self._kept, folder)
        self._kept = kept[-2:]
        for old in kept[:-2]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    def _new_folder(self, version: int) -> Path:
        if self._place is None:
            if self.weights_folder is not None:
                self.weights_folder.mkdir(parents=True, exist_ok=True)
            self._place = Path(tempfile.mkdtemp(prefix="gradwire-weights-", dir=self.weights_folder))
            self._place.chmod(0o755)  # a server may run as another user
            weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"version-{version}-", dir=self._place))
        folder.chmod(0o755)
        return folder

    @abstractmethod
    async def load_weights(self, folder: Path, version: int) -> None:
        """Takes the weights of a folder that ``TrainingClient.export`` wrote (an adapter, or a whole model), and their
        ``version``: at once, so that no sample is of other weights than it says.

        Raises:
            ValueError: when they do not fit the model that is loaded here.
        """
