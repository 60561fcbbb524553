"""Creation of runs from a model or a checkpoint, once per idempotency key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.access.model_names import ModelNames
from gradwire_server.config import Limits
from gradwire_server.core.uploads import Uploads
from gradwire_server.errors import ServiceError, check_length, limit_exceeded
from gradwire_server.journal.checkpoint_records import ORIGIN, CheckpointRecords
from gradwire_server.journal.run_records import RunRecord, RunRecords, new_record
from gradwire_server.scheduling.scheduler import Scheduler

HEADS = ("", "value", "reward", "classification")


class RunCreation:
    """Creation of runs in tasks of the server, so that a client that disconnects midway leaves no incomplete run.

    Args:
        models: The models that a run may be created from.
        uploads: The uploads that it may be created from.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runs: RunRecords,
        checkpoints: CheckpointRecords,
        limits: Limits,
        models: ModelNames,
        uploads: Uploads,
    ) -> None:
        self._scheduler, self._runs, self._checkpoints, self._limits = scheduler, runs, checkpoints, limits
        self._models, self._uploads = models, uploads
        self._creating: dict[str, tuple[RunRecord, asyncio.Task[None]]] = {}

    async def create(self, caller: Caller, given: pb.RunConfig, idempotency_key: str) -> RunRecord:
        """Create a run from a model, or from an upload.

        Raises:
            ServiceError: The settings are invalid, or differ from the upload's; UNKNOWN_CHECKPOINT for the upload;
                ALREADY_EXISTS if the key created a run with other settings.
        """
        config, upload = pb.RunConfig(), None
        config.CopyFrom(given)
        if config.base_model or not config.from_upload:
            config.base_model = self._models.find(config.base_model, "base_model")
        if config.from_upload:
            upload = self._uploads.ready(caller, config.from_upload)
            _take_settings(config, upload)
        self._check(config, idempotency_key)
        request = pb.CreateRunRequest(config=given, idempotency_key=idempotency_key)
        record = new_record(caller.name, config, idempotency_key, _content(request))
        if upload is None:
            return await self._once(record)
        record.origin.checkpoint = f"{record.run_id}/{ORIGIN}"
        record.origin.weights_only = record.origin.fresh_head = True
        return await self._once(record, self._uploads.checkpoint(upload))

    async def fork(self, caller: Caller, request: pb.ForkRunRequest) -> RunRecord:
        """Create a run from a checkpoint.

        Raises:
            ServiceError: As for :meth:`create`; UNKNOWN_CHECKPOINT.
        """
        source, checkpoint = self._checkpoints.get(request.checkpoint, caller)
        config = pb.RunConfig()
        config.CopyFrom(source.config)
        config.ClearField("from_upload")
        if request.HasField("head"):
            config.head, config.num_labels = request.head, request.num_labels
        config.seed, config.name = request.seed, request.name
        self._check(config, request.idempotency_key)
        record = new_record(caller.name, config, request.idempotency_key, _content(request))
        record.origin = engine_pb2.EngineCreateRun(
            run_id=record.run_id,
            config=config,
            checkpoint=f"{record.run_id}/{ORIGIN}",
            weights_only=not request.with_optimizer,
            fresh_head=request.HasField("head"),
        )
        record.forked_from = checkpoint.path
        return await self._once(record, self._checkpoints.folder(source.run_id, "checkpoints", checkpoint.name))

    async def _once(self, record: RunRecord, origin: Path | None = None) -> RunRecord:
        known = self._known(record)
        if known is None:
            known = record
            task = asyncio.create_task(self._scheduler.create(record, origin))
            self._creating[record.run_id] = record, task
            task.add_done_callback(lambda done: self._created(record.run_id, done))
        if known.run_id in self._creating:
            await asyncio.shield(self._creating[known.run_id][1])
        return known

    def _created(self, run_id: str, task: asyncio.Task[Any]) -> None:
        del self._creating[run_id]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a caller that still waits gets it, and asyncio logs no warning

    def _known(self, record: RunRecord) -> RunRecord | None:
        known = self._runs.by_key(record.owner, record.idempotency_key)
        if known is None and record.idempotency_key:  # its task may not have inserted the record yet
            sought = record.owner, record.idempotency_key
            making = (other for other, _ in self._creating.values())
            known = next((other for other in making if (other.owner, other.idempotency_key) == sought), None)
        if known is not None and known.request != record.request:
            raise ServiceError(
                pb.ERROR_CODE_ALREADY_EXISTS,
                f"this idempotency key made the run {known.run_id} with other settings; a new run takes a new key",
                field="idempotency_key",
            )
        return known

    def _check(self, config: pb.RunConfig, key: str) -> None:
        if config.head not in HEADS:
            raise _invalid(f'head is {config.head[:50]!r}; it is "", "value", "reward" or "classification"', "head")
        if config.head == "classification" and config.num_labels < 2:
            raise _invalid(f"num_labels is {config.num_labels}; a classification head has 2 at least", "num_labels")
        if config.head != "classification" and config.num_labels:
            raise _invalid('num_labels goes with head="classification"', "num_labels")
        if not 0.0 <= config.dropout < 1.0:
            raise _invalid(f"dropout is {config.dropout}; 0 <= dropout < 1", "dropout")
        if config.kind not in ("", "rl"):
            raise _invalid(f'kind is {config.kind[:50]!r}; it is "" or "rl"', "kind")
        if config.HasField("lora"):
            if not config.lora.rank:
                raise _invalid("lora needs a rank of at least 1; leave lora out to train all weights", "lora.rank")
            if not 0.0 <= config.lora.dropout < 1.0:
                raise _invalid(f"lora.dropout is {config.lora.dropout}; 0 <= dropout < 1", "lora.dropout")
            if not 0.0 <= config.lora.alpha < float("inf"):
                raise _invalid(
                    f"lora.alpha is {config.lora.alpha}; it is a finite number, 0 for 2 * rank", "lora.alpha"
                )
        modules = config.lora.target_modules
        texts = [
            ("name", config.name),
            ("idempotency_key", key),
            *(("tags", text) for pair in config.tags.items() for text in pair),
        ]
        texts += [("lora.target_modules", module) for module in modules]
        for field, count in (("tags", len(config.tags)), ("lora.target_modules", len(modules))):
            if count > self._limits.max_tags:
                raise limit_exceeded(f"{count} {field}", "max_tags", self._limits.max_tags, field)
        for field, text in texts:
            check_length(text, "max_name_chars", self._limits.max_name_chars, field)


def _take_settings(config: pb.RunConfig, upload: pb.Upload) -> None:
    """Complete a run's settings with those of the upload that it starts from.

    Raises:
        ServiceError: INVALID_ARGUMENT for a setting that differs from the upload's.
    """
    if config.base_model and config.base_model != upload.base_model:
        raise _differs("base_model", config.base_model, upload.base_model)
    config.base_model = upload.base_model
    if upload.kind == "model":
        if config.HasField("lora"):
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                "LoRA runs share the server's copy of the base model, so they cannot start from an uploaded whole"
                " model: leave lora out to train all weights, or serve the folder itself with `gradwire serve --model`",
                field="lora",
            )
        return
    given, own = config.lora, upload.lora
    for name in ("rank", "alpha"):
        if getattr(given, name) and getattr(given, name) != getattr(own, name):
            raise _differs(f"lora.{name}", getattr(given, name), getattr(own, name))
    if given.target_modules and sorted(given.target_modules) != list(own.target_modules):
        raise _differs("lora.target_modules", list(given.target_modules), list(own.target_modules) or "all-linear")
    dropout = given.dropout or own.dropout  # a setting of the training, not of the weights
    config.lora.CopyFrom(own)
    config.lora.dropout = dropout


def _differs(field: str, given: object, own: object) -> ServiceError:
    return _invalid(f"{field} is {given!r}, and the uploaded adapter's is {own!r}: leave it out", field)


def _content(request: pb.CreateRunRequest | pb.ForkRunRequest) -> bytes:
    return request.SerializeToString(deterministic=True)


def _invalid(message: str, field: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field=field)
