"""Routes of training."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter
from google.protobuf.message import DecodeError
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.checkpoint_files import SNAPSHOT
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import BodyOf, CallerOf, TraceparentOf
from gradwire_server.doors.http.tinker.audit import note
from gradwire_server.doors.http.tinker.batch_process import BatchPool
from gradwire_server.doors.http.tinker.datums import EncodedBatch, loss_batch, loss_operation
from gradwire_server.doors.http.tinker.models import PASSING_ERRORS, Models
from gradwire_server.doors.http.tinker.names import (
    TinkerPath,
    check_name,
    model_id_of,
    request_id_of,
    sampler_id_of,
)
from gradwire_server.doors.http.tinker.operation_route import operation_route
from gradwire_server.doors.http.tinker.samplers import Samplers
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.sessions import session_of
from gradwire_server.doors.http.tinker.store import (
    ModelRecord,
    SamplerRecord,
    SavedRecord,
    TinkerStore,
    WidthsRecord,
)
from gradwire_server.doors.http.tinker.training_requests import (
    MAX_NUMBER,
    AdamParams,
    CreateModelRequest,
    LoadWeightsRequest,
    ModelIdRequest,
    OptimizerConfig,
    OptimStepRequest,
    SaveForSamplerRequest,
    SaveWeightsRequest,
)
from gradwire_server.doors.wire_format import SMALL_BYTES, TooLargeFieldsError, TooManyFieldsError, without
from gradwire_server.errors import ServiceError, invalid, limit_exceeded
from gradwire_server.limits import Limits

ALPHA = 32.0
MAX_SETTINGS, SETTINGS_BYTES = 1024, 1 << 20
"""Fields of a large batch beside its data: the model, the loss and its settings."""


def routes(
    core: Core, store: TinkerStore, models: Models, saved: SavedWeights, samplers: Samplers, batches: BatchPool
) -> APIRouter:
    """The routes over the door's state."""
    router = APIRouter(route_class=operation_route(models))

    @router.post("/create_model")
    async def create_model(caller: CallerOf, request: CreateModelRequest) -> dict[str, str]:
        """Make a model with a new adapter."""
        session_of(store, caller.name, request.session_id)
        _check_optimizer(request.optimizer_config)
        if request.lora_config is None:
            raise invalid("give a lora_config: through this protocol models are trained with LoRA", "lora_config")
        lora = request.lora_config
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise invalid("train_attn, train_mlp and train_unembed are off: nothing is left to train", "lora_config")
        asked = ModelRecord(
            owner=caller.name,
            model_id=model_id_of(request.session_id, request.model_seq_id),
            session_id=request.session_id,
            base_model=core.model_name(request.base_model),
            rank=lora.rank,
            alpha=ALPHA,
            seed=secrets.randbelow(MAX_NUMBER) if lora.seed is None else lora.seed % 2**63,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            user_metadata=request.user_metadata or {},
        )
        return _promise(await models.create(caller, asked), asked.model_id)

    @router.post("/load_weights")
    async def load_weights(caller: CallerOf, request: LoadWeightsRequest, trace: TraceparentOf) -> dict[str, str]:
        """Make a model from a checkpoint, or load one into a model."""
        if request.model_id is not None and request.seq_id is not None:
            return await _load_into(caller, request, request.model_id, request.seq_id, trace)
        _check_load(request)
        if request.session_id is None or request.model_seq_id is None:
            raise invalid("give session_id and model_seq_id, or model_id and seq_id", "session_id")
        session_of(store, caller.name, request.session_id)
        source = (
            store.models[TinkerPath.read(request.path).model_id] if saved.checkpoint(caller, request.path) else None
        )
        if request.base_model and source is not None and request.base_model != source.base_model:
            message = f"the checkpoint is of {source.base_model}, not of {request.base_model[:200]}"
            raise invalid(message, "base_model")
        asked = ModelRecord(
            owner=caller.name,
            model_id=model_id_of(request.session_id, request.model_seq_id),
            session_id=request.session_id,
            path=request.path,
            optimizer=request.optimizer,
            seed=secrets.randbelow(MAX_NUMBER),
            alpha=ALPHA,
            user_metadata=request.user_metadata or {},
        )
        if source is not None:
            train = {name: getattr(source, name) for name in ("train_attn", "train_mlp", "train_unembed")}
            asked = asked.model_copy(update=train)
        return _promise(await models.create(caller, asked), asked.model_id)

    async def _load_into(
        caller: Caller, request: LoadWeightsRequest, model_id: str, seq: int, trace: str
    ) -> dict[str, str]:
        refusal, checkpoint = None, ""
        try:
            _check_load(request)
            checkpoint = saved.checkpoint(caller, request.path)
        except ServiceError as error:
            refusal = error.error
        operation = pb.Operation(
            load_checkpoint=pb.LoadCheckpoint(checkpoint=checkpoint, weights_only=not request.optimizer)
        )
        promise = await models.submit(caller, model_id, seq, "load", operation, refusal=refusal, traceparent=trace)
        return _promise(promise, model_id)

    @router.post("/get_info")
    async def get_info(caller: CallerOf, request: ModelIdRequest) -> dict[str, Any]:
        """A model's base model and adapter."""
        model = await models.created(caller, request.model_id)
        arch = core.model_info(model.base_model).architecture
        data = {"arch": arch, "model_name": model.base_model, "tokenizer_id": model.base_model}
        return {
            "type": "get_info", "model_id": model.model_id, "model_name": model.base_model,
            "is_lora": True, "lora_rank": model.rank, "model_data": data,
        }  # fmt: skip

    @router.post("/forward_backward")
    async def forward_backward(caller: CallerOf, body: BodyOf, trace: TraceparentOf) -> dict[str, str]:
        """Accumulate a loss's gradients, or compute the loss alone. What is wrong with the data fails the promise."""
        asked = await _asked(body, core.config.limits)
        if not 1 <= asked.seq_id < MAX_NUMBER:
            raise invalid(f"seq_id is {asked.seq_id}; numbers begin at 1", "seq_id")
        model = await models.created(caller, asked.model_id)
        base, batch, refusal = core.model_info(model.base_model), None, None
        try:
            if len(body) > SMALL_BYTES:
                batch = await batches.encode(caller.name, base, body)
            else:
                batch = EncodedBatch.of(loss_batch(asked, base, core.config.limits))
        except ServiceError as error:
            if error.code in PASSING_ERRORS:
                raise
            refusal = error.error
        if batch is not None and batch.widths is not None:
            request_id = request_id_of(asked.model_id, asked.seq_id, "loss")
            widths = WidthsRecord(owner=caller.name, request_id=request_id, widths=batch.widths)
            await store.put(store.widths, widths)
        operation = loss_operation(asked) if batch is None else batch.header.operation
        promise = await models.submit(
            caller, asked.model_id, asked.seq_id, "loss", operation, batch, refusal=refusal, traceparent=trace
        )
        return _promise(promise, asked.model_id)

    @router.post("/optim_step")
    async def optim_step(caller: CallerOf, request: OptimStepRequest, trace: TraceparentOf) -> dict[str, str]:
        """Take a step."""
        adam, refusal = request.adam_params, None
        if adam is None or adam.type != "adamw":
            kind = str((request.optimizer_params or {}).get("type", "none"))[:50]
            message = (
                f"optim_step has no adam_params ({kind}): this server steps with AdamW for clients of this protocol"
            )
            adam, refusal = AdamParams(), invalid(message, "optimizer_params").error
        step = pb.OptimStep(
            learning_rate=adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps,
            weight_decay=adam.weight_decay, max_grad_norm=adam.grad_clip_norm,
        )  # fmt: skip
        operation = pb.Operation(optim_step=step)
        promise = await models.submit(
            caller, request.model_id, request.seq_id, "step", operation, refusal=refusal, traceparent=trace
        )
        return _promise(promise, request.model_id)

    @router.post("/save_weights")
    async def save_weights(caller: CallerOf, request: SaveWeightsRequest, trace: TraceparentOf) -> dict[str, str]:
        """Save a checkpoint with the optimizer's state."""
        models.get(caller, request.model_id)
        return await _save(caller, request, TinkerPath(request.model_id, "weights", request.path), "save", trace)

    @router.post("/save_weights_for_sampler")
    async def save_for_sampler(
        caller: CallerOf, request: SaveForSamplerRequest, trace: TraceparentOf
    ) -> dict[str, str]:
        """Save a checkpoint to sample from: one with a name, or a sampler's own."""
        model = await models.created(caller, request.model_id)
        if request.path is not None:
            path = TinkerPath(request.model_id, "sampler_weights", request.path)
            return await _save(caller, request, path, "save_sampler", trace)
        if request.sampling_session_seq_id is None:
            raise invalid("give a path, or a sampling_session_seq_id", "path")
        number = request.sampling_session_seq_id
        name = f"{SNAPSHOT}{number}"
        sampler = SamplerRecord(
            owner=caller.name,
            sampler_id=sampler_id_of(model.session_id, number),
            session_id=model.session_id,
            base_model=model.base_model,
            source=f"{model.run_id}/{name}",
            snapshot=True,
            inflight=request.kind == "inflight",
        )
        await samplers.create(caller, model.session_id, number, sampler)
        operation = pb.Operation(save_checkpoint=pb.SaveCheckpoint(name=name, weights_only=True))
        promise = await models.submit(
            caller, request.model_id, request.seq_id, "save_snapshot", operation, traceparent=trace
        )
        return _promise(promise, request.model_id)

    async def _save(
        caller: Caller, request: SaveWeightsRequest | SaveForSamplerRequest, path: TinkerPath, kind: str, trace: str
    ) -> dict[str, str]:
        refusal, name = None, path.stored_name
        try:
            check_name(path.name, path.kind)
        except ServiceError as error:
            refusal, name = error.error, ""
        else:
            record = SavedRecord(
                owner=caller.name,
                path=str(path),
                user_metadata=request.user_metadata or {},
                seq=request.seq_id,
            )
            if request.ttl_seconds is not None:
                record.expires_at = record.created_at + request.ttl_seconds
            if record.key not in store.saved:  # else it is sent again
                await store.put(store.saved, record)
        overwrite = isinstance(request, SaveWeightsRequest) and request.overwrite
        save = pb.SaveCheckpoint(name=name, overwrite=overwrite, weights_only=path.kind != "weights")
        operation = pb.Operation(save_checkpoint=save)
        promise = await models.submit(
            caller, request.model_id, request.seq_id, kind, operation, refusal=refusal, traceparent=trace
        )
        if refusal is None:
            await note(store, caller, "checkpoint_save", str(path))
        return _promise(promise, request.model_id)

    return router


async def _asked(body: bytes, limits: Limits) -> tinker_pb2.ForwardBackwardRequest:
    """The request of a body; without its data if that is large."""
    request = tinker_pb2.ForwardBackwardRequest
    try:
        if len(body) > SMALL_BYTES:
            body = await without(body, request.DATA_FIELD_NUMBER, limits.max_rows, MAX_SETTINGS, SETTINGS_BYTES)
        return request.FromString(body)
    except TooManyFieldsError:
        raise limit_exceeded("the batch has more data", "max_rows", limits.max_rows, "data") from None
    except TooLargeFieldsError:
        message = (
            f"beside its data the request has more than {MAX_SETTINGS:,} fields, or {SETTINGS_BYTES:,} bytes of them"
        )
        raise invalid(message, "loss_fn_config") from None
    except DecodeError:
        message = "the body is not the protobuf message that this route takes"
        raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message) from None


def _promise(request_id: str, model_id: str) -> dict[str, str]:
    return {"request_id": request_id, "model_id": model_id}


def _check_load(request: LoadWeightsRequest) -> None:
    if request.optimizer_config is not None:
        _check_optimizer(request.optimizer_config)
    if request.weights_access_token:
        raise invalid("access tokens are not served: publish the checkpoint instead", "weights_access_token")


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.type != "adamw":
        message = f"the optimizer {optimizer.type[:50]!r} is not served for clients of this protocol; adamw is"
        raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="optimizer_config")
