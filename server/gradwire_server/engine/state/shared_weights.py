"""Files of runs' weights for other engines, which sample from them: of this machine, or through the store of others.

A file is written once for each set of weights that is asked for, and is never changed. The front deletes it once other
weights of its run have been asked for and no request needs it. It holds nothing that a checkpoint and the journal do
not, so it is not synced, and what remains of another process is deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from pathlib import Path

from gradwire_proto.v1 import engine_pb2, training_pb2
from safetensors.torch import save_file
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.model.placement import whole_tensors
from gradwire_server.engine.model.policy import HEAD_PREFIX
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.stores.store import PASSED, PASSING, Store, passing_place

SHARED = "shared_weights"
"""Folder in the state folder, with a folder for each engine."""


class SharedWeights:
    """Writes runs' weights for other engines.

    Args:
        folder: Folder of the files; whatever it holds is deleted.
        store: For engines that do not find them there.
        agreement: One process of the engine writes.
    """

    def __init__(self, folder: Path, store: Store, agreement: Agreement) -> None:
        self._folder, self._store, self._agreement = folder, store, agreement
        self._newest: dict[tuple[str, bool], tuple[Hashable, str]] = {}
        agreement.once(lambda: shutil.rmtree(folder, ignore_errors=True))

    def share(self, run: EngineRun, name: str, in_store: bool) -> engine_pb2.EngineSharedWeights:
        """Write a run's weights without its head into a file of this name, unless a file has them already.

        Raises:
            OSError, SafetensorError, StoreError: It cannot be written.
        """
        version, (known, file) = run.policy.version, self._newest.get((run.run_id, in_store), (None, ""))
        if version != known:
            file = f"{PASSING}/{name}" if in_store else str(self._folder / f"{name}.safetensors")
            tensors = {key: each for key, each in run.policy.state_tensors().items() if not key.startswith(HEAD_PREFIX)}
            whole = whole_tensors(tensors)
            with self._agreement.together("share weights"):
                self._agreement.once(lambda: self._write(file, whole, in_store))
            self._newest[run.run_id, in_store] = version, file
        config = training_pb2.RunConfig(base_model=run.config.base_model)
        if run.config.HasField("lora"):
            config.lora.CopyFrom(run.config.lora)
        return engine_pb2.EngineSharedWeights(run_id=run.run_id, file=file, config=config, in_store=in_store)

    def _write(self, file: str, whole: dict[str, Tensor], in_store: bool) -> None:
        if in_store:
            with self._store.replacing(passing_place(file)) as folder:
                save_file(whole, folder / PASSED)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, file)

    def forget(self, run_id: str) -> None:
        """Forget a run that the engine no longer holds."""
        for in_store in (False, True):
            self._newest.pop((run_id, in_store), None)
