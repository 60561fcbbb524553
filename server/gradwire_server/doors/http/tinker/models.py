"""Models of the protocol as runs of the core: made once, and their operations in order of the client's numbers.

A model's numbers are the run's. An operation that comes before an earlier one is kept in the store and promised at
once, as the client may send the earlier one only after that; it is journaled when its turn comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.calls import CallKind
from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.tinker.datums import EncodedBatch
from gradwire_server.doors.http.tinker.names import TinkerPath, request_id_of
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.store import ModelRecord, TinkerStore
from gradwire_server.errors import ServiceError
from gradwire_server.observability.tracing import MAX_TRACEPARENT

if TYPE_CHECKING:
    from gradwire_server.journal.rows import StoredResult

log = logging.getLogger(__name__)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = "lm_head"
NO_PAYLOAD = codec.digest([])
PASSING_ERRORS = (pb.ERROR_CODE_ENGINE_UNAVAILABLE, pb.ERROR_CODE_SHUTTING_DOWN, pb.ERROR_CODE_STORAGE_FULL)


class Models:
    """The models of every client."""

    def __init__(self, core: Core, store: TinkerStore, saved: SavedWeights) -> None:
        self._core, self._store, self.saved = core, store, saved
        self._making: dict[str, asyncio.Task[None]] = {}
        self._forgetting: set[asyncio.Task[None]] = set()
        self._delivered: dict[str, dict[int, float]] = {}

    async def start(self) -> None:
        """Submit the operations again that had come before an earlier number when the server ended."""
        for model_id, seq, content in await self._store.early():
            model = self._store.models.get(model_id)
            if model is None or not model.run_id:
                await self._store.drop_early(model_id, seq)
                continue
            caller = Caller(model.owner)
            try:
                self._submit_early(caller, model, seq, content)
            except ServiceError as error:
                log.warning("operation %d of %s was not taken up again: %s", seq, model_id, error)

    async def stop(self) -> None:
        """Leave models that are being made to the next start."""
        for task in [*self._making.values(), *self._forgetting]:
            task.cancel()
        await asyncio.gather(*self._making.values(), *self._forgetting, return_exceptions=True)

    # ---- models ----

    def get(self, caller: Caller, model_id: str) -> ModelRecord:
        """A model that the caller may train."""
        model = self._store.models.get(model_id)
        if model is None or not (caller.role == "admin" or caller.name == model.owner):
            message = f"there is no model {model_id[:200]!r}: create it first, with the same key"
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_RUN, message, field="model_id")
        return model

    async def create(self, caller: Caller, asked: ModelRecord) -> str:
        """Begin to make a model, once; returns the promise, which is durable.

        Raises:
            ServiceError: UNKNOWN_MODEL, UNKNOWN_CHECKPOINT; SEQ_REUSED for the id of another model.
        """
        known = self._store.models.get(asked.model_id)
        if known is None:
            if asked.path:
                self.saved.checkpoint(caller, asked.path)
            await self._store.put(self._store.models, asked)
            known = asked
        elif known.owner != asked.owner or _settings(known) != _settings(asked):
            message = f"the model {asked.model_id} was created with other settings: number the next one differently"
            raise ServiceError(pb.ERROR_CODE_SEQ_REUSED, message, field="model_seq_id")
        self._make(caller, known)
        return request_id_of(known.model_id, 0, "load" if known.path else "create")

    async def created(self, caller: Caller, model_id: str) -> ModelRecord:
        """A model once it is made.

        Raises:
            ServiceError: It could not be made; UNKNOWN_RUN.
        """
        model = self.get(caller, model_id)
        if not model.run_id and not model.error:
            await asyncio.shield(self._make(caller, model))
        model = self.get(caller, model_id)
        if model.error:
            raise ServiceError.of(pb.Error.FromString(bytes.fromhex(model.error)))
        return model

    def _make(self, caller: Caller, model: ModelRecord) -> asyncio.Task[None]:
        task = self._making.get(model.model_id)
        if task is None:
            task = self._making[model.model_id] = asyncio.create_task(self._made(caller, model))
            task.add_done_callback(lambda done: self._ended(model.model_id, done))
        return task

    def _ended(self, model_id: str, done: asyncio.Task[None]) -> None:
        del self._making[model_id]
        if not done.cancelled():
            done.exception()  # mark it as retrieved; those who wait get it

    async def _made(self, caller: Caller, model: ModelRecord) -> None:
        if model.run_id or model.error:
            return
        try:
            async with self._core.calls.turn(caller.name, CallKind.CREATE):
                run = await self._run(caller, model)
            await self._core.open_run(caller, run.run_id, writer_of(model), takeover=True)
            made = {"run_id": run.run_id, "base_model": run.config.base_model, "rank": run.config.lora.rank}
            await self._store.put(self._store.models, model.model_copy(update=made))
        except ServiceError as error:
            if error.code in PASSING_ERRORS:
                raise
            failed = {"error": error.error.SerializeToString().hex()}
            await self._store.put(self._store.models, model.model_copy(update=failed))

    async def _run(self, caller: Caller, model: ModelRecord) -> pb.Run:
        key = f"tinker:{model.model_id}"
        if model.path:
            fork = pb.ForkRunRequest(
                checkpoint=self.saved.checkpoint(caller, model.path),
                seed=model.seed,
                name=model.model_id,
                with_optimizer=model.optimizer,
                idempotency_key=key,
            )
            return await self._core.runs.fork(caller, fork)
        lora = pb.LoraSettings(rank=model.rank, alpha=model.alpha, target_modules=_modules(model))
        config = pb.RunConfig(base_model=model.base_model, lora=lora, seed=model.seed, name=model.model_id)
        return await self._core.runs.create(caller, config, key)

    # ---- operations ----

    async def submit(
        self,
        caller: Caller,
        model_id: str,
        seq: int,
        kind: str,
        operation: pb.Operation,
        batch: EncodedBatch | None = None,
        *,
        refusal: pb.Error | None = None,
        traceparent: str = "",
    ) -> str:
        """Submit an operation; returns the promise once the operation is durable.

        Args:
            kind: The kind of its result, for the promise's id.
            batch: Its batch, if it has one.
            refusal: Why the operation fails; it uses up its number all the same.

        Raises:
            ServiceError: It was not accepted; its number stays free.
        """
        model = await self.created(caller, model_id)
        header, payload = pb.OperationHeader(operation=operation, payload_digest=NO_PAYLOAD), list[bytes]()
        if batch is not None:
            header.CopyFrom(batch.header)
            payload = batch.payload
        header.MergeFrom(
            pb.OperationHeader(
                seq=seq, failure_seen=model.failure_seen, traceparent=traceparent[:MAX_TRACEPARENT], refusal=refusal
            )
        )
        accepted = self._accept(caller, model, header, payload)
        if self._core.awaits_number(caller, model.run_id, seq):
            content = pb.SubmitFrame(header=header, chunk=b"".join(payload)).SerializeToString()
            await self._store.keep_early(model_id, seq, content)
            accepted.add_done_callback(lambda done: self._journaled(model_id, seq, done))
        else:
            await self._accepted(accepted)
        model.used_at = time.time()
        return request_id_of(model_id, seq, kind)

    def _accept(
        self, caller: Caller, model: ModelRecord, submitted: pb.OperationHeader, payload: list[bytes]
    ) -> asyncio.Future[pb.SubmitAck]:
        header = pb.OperationHeader()
        header.CopyFrom(submitted)
        header.run_id, header.epoch = model.run_id, self._core.epoch_of(caller, model.run_id, writer_of(model))
        incoming = self._core.receive(caller, header)
        if submitted.HasField("refusal"):
            incoming.refusal = submitted.refusal
        for part in payload:
            incoming.add(part)
        return self._core.submit(caller, incoming)

    async def _accepted(self, accepted: asyncio.Future[pb.SubmitAck]) -> None:
        try:
            await asyncio.shield(accepted)
        except ServiceError as error:
            if error.code != pb.ERROR_CODE_RESULT_RELEASED:  # it was accepted before; its promise stands
                raise

    def _submit_early(self, caller: Caller, model: ModelRecord, seq: int, content: bytes) -> None:
        frame = pb.SubmitFrame.FromString(content)
        accepted = self._accept(caller, model, frame.header, [frame.chunk] if frame.chunk else [])
        accepted.add_done_callback(lambda done: self._journaled(model.model_id, seq, done))

    def _journaled(self, model_id: str, seq: int, accepted: asyncio.Future[pb.SubmitAck]) -> None:
        if accepted.cancelled():
            return
        error = accepted.exception()
        if isinstance(error, ServiceError) and error.code in PASSING_ERRORS:
            return  # the next start submits it again
        task = asyncio.create_task(self._store.drop_early(model_id, seq))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def result(self, caller: Caller, model: ModelRecord, seq: int) -> StoredResult:
        """Wait for the result of an operation.

        Raises:
            ServiceError: As for :meth:`.core.Core.results`.
        """
        results: Any = self._core.results(caller, model.run_id, seq)
        async with aclosing(results) as pages:
            async for page in pages:
                found: StoredResult = page[0]
                return found
        raise AssertionError("results never end")

    def delivered(self, model_id: str, seq: int) -> None:
        """Note that a result was sent to the client, which may ask for it again if the answer was lost."""
        self._delivered.setdefault(model_id, {}).setdefault(seq, time.time())

    async def release_delivered(self, before: float, kept: int) -> None:
        """Delete the results that were sent before this time, of each model up to the first that was not.

        Args:
            kept: Results of a model beyond this number go too, those sent first.
        """
        for model_id, sent in list(self._delivered.items()):
            model = self._store.models.get(model_id)
            if model is None:
                del self._delivered[model_id]
                continue
            try:
                await self._release(model, sent, before, kept)
            except ServiceError as error:
                if error.code not in (pb.ERROR_CODE_STALE_EPOCH, pb.ERROR_CODE_UNKNOWN_RUN):
                    raise
                log.info("results of %s are not this door's any more: %s", model_id, error)
                del self._delivered[model_id]

    async def _release(self, model: ModelRecord, sent: dict[int, float], before: float, kept: int) -> None:
        owner = Caller(model.owner)
        run = self._core.runs.get(owner, model.run_id)
        seq, spare = run.released_seq, len(sent) - kept
        while seq + 1 in sent and (sent[seq + 1] < before or spare > 0):
            seq, spare = seq + 1, spare - 1
        if seq == run.released_seq:
            return
        epoch = self._core.epoch_of(owner, model.run_id, writer_of(model))
        await self._core.release_results(owner, model.run_id, seq, epoch)
        for done in [done for done in sent if done <= seq]:
            del sent[done]
            await self._store.delete(self._store.widths, request_id_of(model.model_id, done, "loss"))

    async def forget(self, *models: ModelRecord) -> None:
        """Forget models that are gone, and what belongs to them."""
        ids, store = {model.model_id for model in models}, self._store
        for model_id in ids:
            self._delivered.pop(model_id, None)
            await store.drop_early_of(model_id)
        await store.delete(store.widths, *[key for key in store.widths if key.rsplit(":", 2)[0] in ids])
        saved = [key for key, each in store.saved.items() if TinkerPath.read(each.path).model_id in ids]
        await store.delete(store.saved, *saved)
        await store.delete(store.models, *ids)

    def being_made(self, model_id: str) -> bool:
        """Whether a model is being made now."""
        return model_id in self._making

    async def failure_delivered(self, model_id: str, seq: int) -> None:
        """Note that the client knows of a failure: operations that it sends from now on are not aborted by it."""
        model = self._store.models[model_id]
        if seq > model.failure_seen:
            await self._store.put(self._store.models, model.model_copy(update={"failure_seen": seq}))


def writer_of(model: ModelRecord) -> str:
    """The name with which the door opens a model's run."""
    return f"tinker:{model.model_id}"


def _modules(model: ModelRecord) -> list[str]:
    """The modules of a new adapter."""
    unembed = (UNEMBED,) if model.train_unembed else ()
    if model.train_attn and model.train_mlp:
        return ["all-linear", *unembed]
    return [*(ATTENTION if model.train_attn else ()), *(MLP if model.train_mlp else ()), *unembed]


def _settings(model: ModelRecord) -> tuple[object, ...]:
    """The client's settings for a model; for one from a checkpoint, only those that the checkpoint does not fix."""
    if model.path:
        return model.path, model.optimizer
    return model.base_model, model.rank, model.train_attn, model.train_mlp, model.train_unembed
