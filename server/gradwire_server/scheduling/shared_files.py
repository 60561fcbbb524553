"""The files of runs' weights that engines have written for other engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from pathlib import Path

from gradwire_proto.v1 import engine_pb2


class SharedFiles:
    """The files of weights that engines have written for others; one is deleted once it is neither used nor newest."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()
        self._newest: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def request(self, run_id: str) -> engine_pb2.EngineRequest:
        """The request for the weights that a run has now."""
        share = engine_pb2.EngineShareWeights(run_id=run_id, name=f"{run_id}-{next(self._numbers)}")
        return engine_pb2.EngineRequest(share_weights=share)

    def keep(self, weights: engine_pb2.EngineSharedWeights) -> None:
        """Keep the weights that an engine has just answered with until :meth:`release`."""
        self._uses[weights.file] += 1
        before, self._newest[weights.run_id] = self._newest.get(weights.run_id), weights.file
        if before is not None and before != weights.file:
            self._delete_unused(before)

    def release(self, weights: engine_pb2.EngineSharedWeights) -> None:
        """Undo :meth:`keep`."""
        self._uses[weights.file] -= 1
        if self._newest.get(weights.run_id) != weights.file:
            self._delete_unused(weights.file)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        newest = self._newest.pop(run_id, None)
        if newest is not None:
            self._delete_unused(newest)

    def _delete_unused(self, file: str) -> None:
        if self._uses[file]:
            return
        del self._uses[file]
        asyncio.get_running_loop().run_in_executor(None, _delete, Path(file))


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
