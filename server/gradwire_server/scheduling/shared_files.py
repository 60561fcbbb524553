"""The files of runs' weights that engines have written for other engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from pathlib import Path

from gradwire_proto.v1 import engine_pb2

from gradwire_server.stores.store import PASSING, Store, StoreError

log = logging.getLogger(__name__)


class SharedFiles:
    """The files of weights that engines have written for others; one is deleted once it is neither used nor newest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uses: Counter[str] = Counter()
        self._newest: dict[tuple[str, bool], str] = {}
        self._numbers = itertools.count(1)

    def request(self, run_id: str, through_store: bool) -> engine_pb2.EngineRequest:
        """The request for the weights that a run has now."""
        name = f"{run_id}-{next(self._numbers)}"
        share = engine_pb2.EngineShareWeights(run_id=run_id, name=name, through_store=through_store)
        return engine_pb2.EngineRequest(share_weights=share)

    def keep(self, weights: engine_pb2.EngineSharedWeights) -> None:
        """Keep the weights that an engine has just answered with until :meth:`release`."""
        self._uses[weights.file] += 1
        newest = weights.run_id, weights.in_store
        before, self._newest[newest] = self._newest.get(newest), weights.file
        if before is not None and before != weights.file:
            self._delete_unused(before)

    def release(self, weights: engine_pb2.EngineSharedWeights) -> None:
        """Undo :meth:`keep`."""
        self._uses[weights.file] -= 1
        if self._newest.get((weights.run_id, weights.in_store)) != weights.file:
            self._delete_unused(weights.file)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        for in_store in (False, True):
            newest = self._newest.pop((run_id, in_store), None)
            if newest is not None:
                self._delete_unused(newest)

    def _delete_unused(self, file: str) -> None:
        if self._uses[file]:
            return
        del self._uses[file]
        asyncio.get_running_loop().run_in_executor(self._store.threads, self._delete, file)

    def _delete(self, file: str) -> None:
        try:
            if file.startswith(f"{PASSING}/"):
                self._store.delete_all(file)
            else:
                Path(file).unlink(missing_ok=True)
        except (OSError, StoreError) as error:
            log.warning("weights that nobody needs stay in %s: %s", file, error)
