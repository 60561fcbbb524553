"""The route that waits for results. A waiting request is a suspended coroutine; it costs no thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from gradwire_http.models import BoundedModel
from gradwire_http.request_headers import PROTOBUF
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.models import Models
from gradwire_server.doors.http.tinker.names import TinkerPath, read_request_id, sampler_id_of
from gradwire_server.doors.http.tinker.results import failed, loss_output, step_output
from gradwire_server.doors.http.tinker.samplers import SampleGoneError, Samplers
from gradwire_server.doors.http.tinker.store import ModelRecord, TinkerStore
from gradwire_server.errors import ServiceError, invalid

if TYPE_CHECKING:
    from gradwire_server.journal.rows import StoredResult

HOLD_S = 30.0
"""How long a request waits for its result before the client is asked to come again."""
PAUSE_S = 5.0
"""How long a request waits if its result cannot come for now."""

T = TypeVar("T")


class RetrieveRequest(BoundedModel):
    """A promise whose result is wanted."""

    request_id: str


class _HeldTooLong(Exception):
    """A request has waited as long as it may."""


class _Holds:
    """Requests that wait for their results: :data:`HOLD_S` seconds, or until the server is about to stop.

    Args:
        stopping: Set when the server is about to stop.
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._limits: set[asyncio.Timeout] = set()
        self._ending: asyncio.Task[None] | None = None

    async def until_done(self, work: Awaitable[T]) -> T:
        """Wait for work, in the caller's own task: a result costs no other one.

        Raises:
            _HeldTooLong: It is not done in time, and was cancelled.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        limit = asyncio.timeout(0 if self._stopping.is_set() else HOLD_S)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await work
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise _HeldTooLong from None
            raise

    async def _end(self) -> None:
        await self._stopping.wait()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


class _NotYet(Exception):
    """There is no result yet."""

    def __init__(self, state: str = "active", reason: str = "") -> None:
        super().__init__(state)
        self.state, self.reason = state, reason


def routes(store: TinkerStore, models: Models, samplers: Samplers, stopping: asyncio.Event) -> APIRouter:
    """The routes over the door's state."""
    router, holds = APIRouter(), _Holds(stopping)

    @router.post("/retrieve_future")
    async def retrieve_future(caller: CallerOf, request: RetrieveRequest) -> Response:
        """Wait for the result of a promise."""
        owner_id, seq, kind = read_request_id(request.request_id)
        try:
            if kind == "sample":
                return Response(await _held(samplers.result(caller, owner_id, seq)), media_type=PROTOBUF)
            model = models.get(caller, owner_id)
            if not model.run_id:
                model = await _held(models.created(caller, owner_id))
            if seq == 0:
                return JSONResponse(_created(model))
            return await _training(caller, model, seq, kind)
        except _NotYet as waiting:
            body = {"type": "try_again", "request_id": request.request_id, "queue_state": waiting.state}
            if waiting.reason:
                body["queue_state_reason"] = waiting.reason
            return JSONResponse(body, 408)
        except SampleGoneError:
            message = "this sample is not known any more: the server was restarted, or it was fetched long ago"
            return JSONResponse({"detail": message}, 410)
        except ServiceError as error:
            if error.code in (pb.ERROR_CODE_UNKNOWN_OPERATION, pb.ERROR_CODE_UNKNOWN_RUN) and kind != "sample":
                raise
            return JSONResponse(failed(error.error, store.in_its_names(error.error.message)))

    @router.post("/cancel_future")
    async def cancel_future(caller: CallerOf, request: RetrieveRequest) -> dict[str, Any]:
        """End a sample that nobody waits for any more."""
        owner_id, seq, kind = read_request_id(request.request_id)
        if kind != "sample":
            raise invalid("operations of training cannot be cancelled by this protocol; samples can", "request_id")
        with contextlib.suppress(SampleGoneError):  # then there is nothing to end
            samplers.cancel(caller, owner_id, seq)
        return {}

    async def _training(caller: Caller, model: ModelRecord, seq: int, kind: str) -> Response:
        stored = await _held(models.result(caller, model, seq))
        models.delivered(model.model_id, seq)
        if stored.header.status != pb.STATUS_SUCCEEDED:
            await models.failure_delivered(model.model_id, seq)
            await models.saved.forget(model.model_id, seq)
            return JSONResponse(failed(stored.header.error, store.in_its_names(stored.header.error.message)))
        if kind == "loss":
            widths = store.widths.get(f"{model.model_id}:{seq}:{kind}")
            return Response(loss_output(stored, widths.widths if widths else None), media_type=PROTOBUF)
        if kind == "step":
            return JSONResponse(step_output(stored.header.optim_step))
        if kind == "save_external":
            await _exported(model, stored)
        return JSONResponse(_checkpoint(model, kind, stored))

    async def _exported(model: ModelRecord, stored: StoredResult) -> None:
        """Note the size of exported weights, from when on they are listed."""
        saved = store.saved.get(str(TinkerPath.stored(model.model_id, stored.header.export.name)))
        if saved is not None and saved.size_bytes is None:
            await store.put(store.saved, saved.model_copy(update={"size_bytes": stored.header.export.size_bytes}))

    def _checkpoint(model: ModelRecord, kind: str, stored: StoredResult) -> dict[str, Any]:
        run_id, _, name = stored.header.checkpoint.path.partition("/")
        if kind == "save_external":
            exported = TinkerPath.stored(model.model_id, stored.header.export.name)
            return {"type": "save_weights_external", "path": str(exported)}
        if kind == "save_snapshot":
            return {"type": "save_weights_for_sampler", "sampling_session_id": _sampler_of(model, name)}
        source = store.models_by_run.get(run_id, model)
        path = str(TinkerPath.stored(source.model_id, name) or f"{run_id}/{name}")
        if kind == "load":
            return {"type": "load_weights", "path": path, "model_id": model.model_id}
        return {"type": "save_weights" if kind == "save" else "save_weights_for_sampler", "path": path}

    async def _held(work: Awaitable[T]) -> T:
        try:
            return await holds.until_done(work)
        except _HeldTooLong:
            if stopping.is_set():
                await asyncio.sleep(1)  # clients come again at once
            raise _NotYet from None
        except ServiceError as error:
            if error.code == pb.ERROR_CODE_RUN_PARKED:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), PAUSE_S)
                raise _NotYet("paused_capacity", store.in_its_names(error.error.message)) from error
            if error.code in (pb.ERROR_CODE_SHUTTING_DOWN, pb.ERROR_CODE_ENGINE_UNAVAILABLE):
                await asyncio.sleep(1)
                raise _NotYet from error
            raise

    return router


def _created(model: ModelRecord) -> dict[str, Any]:
    if model.path:
        return {"type": "load_weights", "path": model.path, "model_id": model.model_id}
    return {"type": "create_model", "model_id": model.model_id}


def _sampler_of(model: ModelRecord, snapshot: str) -> str:
    return sampler_id_of(model.session_id, int(snapshot.rpartition(".")[2]))
