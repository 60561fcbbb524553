"""Transfer of weights to an inference module: the run exports them to a folder, and the module loads them."""

from __future__ import annotations

import asyncio
import json
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


def has_tied_head(folder: Path) -> bool:
    """Whether an exported model uses its embedding as its output head."""
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))


class WeightFolder(ABC):
    """Adds :meth:`update_weights` through a folder to an inference module.

    The last two versions stay on disk: a backend may read an adapter again for requests that were sent before the
    newest one arrived.

    Attributes:
        version: Optimizer steps of the policy whose weights are loaded.
        weights_folder: Folder to export to; None: a temporary folder. A remote server must see it under the same path.
    """

    version: int = 0
    weights_folder: Path | None = None
    _place: Path | None = None
    _kept: tuple[Path, ...] = ()

    def can_update(self, run: Any) -> bool:
        return hasattr(run, "export")

    async def update_weights(self, run: Any, version: int) -> None:
        """Load the weights that the run has after the operations submitted so far.

        Args:
            run: A ``TrainingClient``.
            version: Number of optimizer steps by then.
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
        """Load a folder written by ``TrainingClient.export`` (an adapter or a whole model), with its ``version``.

        Weights and version change together, so that every sample reports the right version.

        Raises:
            ValueError: The weights do not fit the loaded model.
        """
