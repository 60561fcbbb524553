"""The Tinker protocol as an application."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel

from gradwire_server.core.core import Core
from gradwire_server.doors.http.direct import direct_routes
from gradwire_server.doors.http.errors import application
from gradwire_server.doors.http.protocol import HttpProtocol
from gradwire_server.doors.http.tinker import (
    audit,
    checkpoints,
    external_weights,
    futures,
    sampling,
    session_search,
    sessions,
    traces,
    training,
    usage,
    weights_upload,
)
from gradwire_server.doors.http.tinker.batch_process import BatchPool
from gradwire_server.doors.http.tinker.collection import TinkerCollection
from gradwire_server.doors.http.tinker.models import Models
from gradwire_server.doors.http.tinker.oversized import oversized_batch
from gradwire_server.doors.http.tinker.samplers import Samplers
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.store import TinkerStore

EACH_STEP = ("/retrieve_future", "/forward_backward", "/optim_step", "/asample")
"""Routes that a program calls at every step."""


class TinkerErrorAnswer(BaseModel):
    """An error."""

    detail: str


class Tinker:
    """The state of the door between requests.

    Args:
        stopping: Set when the server is about to stop.
    """

    def __init__(self, core: Core, stopping: asyncio.Event) -> None:
        self.core, self.stopping = core, stopping
        self.store = TinkerStore(core.config.state_dir, core.config.limits.key_records)
        self.batches = BatchPool(core.config)
        self.saved = SavedWeights(core, self.store)
        self.models = Models(core, self.store, self.saved)
        self.samplers = Samplers(core, self.store)
        self.collection = TinkerCollection(core, self.store, self.saved, self.models, self.samplers)

    async def start(self) -> None:
        """Read what the state folder holds of the door."""
        await self.store.open()
        await self.models.start()
        self.collection.start()

    async def stop(self) -> None:
        """End what is in progress, and close the store."""
        await self.batches.close()
        await self.collection.stop()
        await self.samplers.stop()
        await self.models.stop()
        await self.store.close()


def protocol(tinker: Tinker) -> HttpProtocol:
    """The protocol over the door's state."""

    def in_its_names(status: int, error: pb.Error) -> Mapping[str, Any]:
        return {"detail": tinker.store.in_its_names(error.message)}

    app = application("gradwire for Tinker's SDK", TinkerErrorAnswer, in_its_names)
    routers = [
        futures.routes(tinker.store, tinker.models, tinker.samplers, tinker.stopping),
        training.routes(tinker.core, tinker.store, tinker.models, tinker.saved, tinker.samplers, tinker.batches),
        sampling.routes(tinker.core, tinker.store, tinker.saved, tinker.samplers),
        checkpoints.routes(tinker.core, tinker.store, tinker.models, tinker.saved),
        external_weights.routes(tinker.core, tinker.store, tinker.models, tinker.saved),
        weights_upload.routes(tinker.core, tinker.store, tinker.models),
        traces.routes(tinker.core, tinker.store),
        usage.routes(tinker.core, tinker.store),
        audit.routes(tinker.core, tinker.store),
        session_search.routes(tinker.core, tinker.store),
        sessions.routes(tinker.core, tinker.store, tinker.stopping),
    ]
    for router in routers:
        app.include_router(router)
    direct = direct_routes(routers, EACH_STEP)
    oversized = {"/forward_backward": oversized_batch(tinker.models)}
    open_paths = ("/healthz", external_weights.SIGNED, weights_upload.SIGNED, traces.SIGNED)
    return HttpProtocol("tinker", "/api/v1", app, in_its_names, open_paths, direct, oversized)


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in the form that the SDK shows whole."""
    return {"detail": error.message}
