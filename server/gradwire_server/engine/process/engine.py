"""The engine: the models, runs and references of one process, and the answers to most requests."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gradwire_losses.registry import LossSpec, all_losses
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.machine import Share, sampling_cache
from gradwire_server.engine.model.loading.pool import Dtype, ModelPool
from gradwire_server.engine.model.placement import Placement, Sharded
from gradwire_server.engine.model.policy_from_config import is_exact
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import GROUP_TOKENS, Decision
from gradwire_server.engine.operations.lifecycle import Answer, answer_to, begins, failure, not_started, plain_answer
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.table import carry_out
from gradwire_server.engine.process.computed_with import ComputedWith
from gradwire_server.engine.process.setup import why_not_exact
from gradwire_server.engine.sampling.samplers.choice import make_sampler
from gradwire_server.engine.sampling.samplers.sampler import Sampler
from gradwire_server.engine.scoring.memory import Memory
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.adapter_shapes import AdapterShapes
from gradwire_server.engine.state.checkpoints import CheckpointStore, versions
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import References
from gradwire_server.engine.state.residency import Residency
from gradwire_server.engine.state.run_memory import check_memory, check_models
from gradwire_server.engine.state.shared_weights import SHARED, SharedWeights
from gradwire_server.engine.state.snapshot import restore
from gradwire_server.engine.state.uploads import check_upload, import_upload
from gradwire_server.observability.tracing import Tracing
from gradwire_server.stores.opening import open_store
from gradwire_server.tokenizer_files import find_tokenizer

logger = logging.getLogger(__name__)

SPILLED = "spilled"
"""Folder in the state folder of the runs that are neither on the device nor in host memory; one for each engine."""
GIB = 1 << 30
_DTYPES: Mapping[str | None, Dtype | None] = {
    None: None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "mixed": "mixed",
    "float64": torch.float64,
}


class Engine:
    """Answer one ordered stream of requests, except samples and the verification of checkpoints.

    Samples go to :class:`gradwire_server.engine.operations.samples.SamplesInProgress`, checkpoints to
    :class:`.read_back.ReadBack`.

    Args:
        settings: Models, devices and memory; :meth:`hello` reads and reports the facts of ``settings.models``.
        agreement: This process's agreement with the engine's others; by default there are none.
        share: Its share of the machine; by default it has no other engine beside it.
        tracing: Destination of the operations' spans; by default they are dropped.
        staging: As for :func:`.open_store`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        agreement: Agreement | None = None,
        tracing: Tracing | None = None,
        share: Share | None = None,
        *,
        rank: int = 0,
        staging: Path | None = None,
    ) -> None:
        agreement, share = agreement or Agreement(), share or Share()
        device = device_of(settings, rank)
        usable = {**settings.allow_models, **settings.models}
        placement = Placement(device)
        if isinstance(agreement, GroupAgreement) and agreement.models is not None:
            placement = Sharded(device, agreement.models, agreement.defer)
        pool = ModelPool(
            usable,
            placement,
            _DTYPES[settings.dtype],
            compiled=settings.compile,
            quantize=settings.quantize,
            fused=settings.kernels == "auto",
            exact=settings.deterministic,
        )
        self._store = open_store(settings, staging)
        store = CheckpointStore(self._store)
        activations, references = settings.activation_budget_gib, int(settings.reference_cache_gib * GIB)
        self._computed_with = ComputedWith(pool, settings.state_dir)
        # A power of two, so that a few bytes for the kernel change no batch.
        cache_bytes = settings.sampling_cache or sampling_cache(share.device_memory(pool.device))
        sampler: Sampler[Any] = make_sampler(settings.sampler, pool, agreement, cache_bytes, settings.speculate)
        self.context = EngineContext(
            pool=pool,
            store=store,
            references=References(pool, store, cache_bytes=references, in_use=sampler.uses, agreement=agreement),
            sampler=sampler,
            memory=Memory(
                pool.device,
                settings.microbatch_tokens,
                None if activations is None else int(activations * GIB),
                share.steady_memory(),
                agreement=agreement,
            ),
            tracing=tracing or Tracing(),
            residency=Residency(
                settings.state_dir / SPILLED / (f"{share.number}-{rank}" if rank else str(share.number)),
                share.device_memory(pool.device) // 2 if settings.run_memory is None else settings.run_memory,
                share.host_memory() // 4 if settings.run_host_memory is None else settings.run_host_memory,
                lambda run: any(each is not None and sampler.uses(each) for each in (run.policy, run.ema)),
            ),
            tokenizer_files={name: file for name, path in usable.items() if (file := find_tokenizer(path))},
            agreement=agreement,
            shares_prefixes=settings.share_prefixes,
        )
        if settings.group_runs == "on" or (settings.group_runs == "auto" and pool.device.type != "cpu"):
            # Not by default on a CPU, where a replay of the journal is to give the bits that were given before.
            self.context.decisions.group_tokens = GROUP_TOKENS[pool.device.type]
        self._models, self._ranks = list(settings.models), settings.num_ranks
        self._why_not_exact = why_not_exact(settings)
        self._adapter_shapes = AdapterShapes(pool)
        self._shared = SharedWeights(settings.state_dir / SHARED / str(share.number), self._store, agreement)
        self._handlers: Mapping[str, Callable[[Request], Answer]] = {
            "create_run": self._create_run,
            "drop_run": self._drop_run,
            "share_weights": self._share_weights,
            "check_upload": self._check_upload,
            "import_upload": self._import_upload,
            "shutdown": lambda request: plain_answer(empty=training_pb2.Empty()),
        }

    def hello(self) -> engine_pb2.EngineHello:
        """Describe the engine: device, models, losses and tokenizer files.

        Raises:
            OperationError: A model cannot be used.
        """
        pool = self.context.pool
        check_models(pool, self._models)
        device = str(pool.device)
        if pool.device.type == "cuda":
            device = f"{device} ({torch.cuda.get_device_name(pool.device)})"
        if self._ranks > 1:
            device = f"{self._ranks} ranks, {device}{', weights divided' if pool.placement.parts > 1 else ''}"
        if pool.placement.note:
            logger.warning(pool.placement.note)
        return engine_pb2.EngineHello(
            device=device,
            models=[self._model_info(name) for name in self._models],
            losses=[loss_info(loss) for loss in all_losses()],
            ranks=self._ranks,
            tokenizer_files={name: str(file) for name, file in self.context.tokenizer_files.items()},
            computed_with=versions() | self._computed_with.machine(),
        )

    @property
    def gives_way(self) -> bool:
        """Whether samples go on between the micro-batches of an operation."""
        return self.context.sampler.beside_batches

    def now(self, *, settled: bool) -> float:
        """The time in seconds; ``settled``: once the device has computed what it was given."""
        device = self.context.pool.device
        if settled and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def execute(self, decision: Decision) -> Iterator[Answer]:
        """Execute a decision's requests. Errors become part of the answers.

        Raises:
            torch.AcceleratorError: The device is lost, and the process with it.
        """
        with self.context.residency.executing([request.run_id for request in decision.requests]):
            for answer in self._answers(decision):
                self.context.agreement.confirm(answer.reply)
                yield answer

    def _answers(self, decision: Decision) -> Iterator[Answer]:
        operations: list[tuple[Request, Budget]] = []
        for request, budget in zip(decision.requests, decision.budgets, strict=True):
            message = request.message
            if not begins(self.context, decision, message):
                yield answer_to(request, not_started())
            elif request.error is not None:
                yield answer_to(request, failure(self.context, message.operation, request.error))
            elif message.HasField("operation"):
                operations.append((request, budget))
            else:
                yield self._answer(request)
        if operations:
            yield from carry_out(self.context, decision, operations)

    def _answer(self, request: Request) -> Answer:
        """Execute a request that is no operation. Errors become part of the answer.

        Raises:
            torch.AcceleratorError: The device is lost, and the process with it.
        """
        kind = request.message.WhichOneof("kind") or ""
        try:
            if kind not in self._handlers:
                raise ValueError(f"a request of unknown kind {kind!r}")
            answer = self._handlers[kind](request)
        except Exception as error:  # the boundary: the engine goes on and the caller receives the error
            if is_fatal(error):
                raise
            answer = plain_answer(error=to_error(error, f"request {kind}"))
        return answer_to(request, answer)

    # -------------------------------------------------------------- requests

    def _create_run(self, request: Request) -> Answer:
        create, context = request.message.create_run, self.context
        self._drop(create.run_id)
        context.store.fences[create.run_id] = create.fence
        config, fresh_head = create.config, False
        if create.checkpoint:
            theirs = context.store.manifest(create.checkpoint).config
            if create.fresh_head:
                fresh_head = (config.head, config.num_labels) != (theirs.head, theirs.num_labels)
            else:
                config.head, config.num_labels = theirs.head, theirs.num_labels
        if is_exact(context.pool, config) and self._why_not_exact:
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED, f"deterministic: {self._why_not_exact}", field="deterministic"
            )
        check_memory(context.pool, create, context.agreement)
        run = EngineRun(context.pool, create.run_id, config)
        try:
            if create.checkpoint:
                restore(run, context.store, create.checkpoint, weights_only=create.weights_only, fresh_head=fresh_head)
            context.memory.measure(run)
        except Exception:  # whatever the error, give back what the run holds of the shared model
            run.close()
            raise
        context.runs[create.run_id] = run
        context.residency.add(run)
        return plain_answer(
            run_created=engine_pb2.EngineRunCreated(
                num_trainable_parameters=run.policy.num_trainable_parameters,
                step=run.step,
                seq=run.seq,
                head=run.config.head,
                num_labels=run.config.num_labels,
                computed_with=context.agreement.once(
                    lambda: self._computed_with.facts(
                        create.config.base_model, deterministic=run.policy.split_model.exact
                    )
                ),
                part_bytes=run.accumulator.parts.nbytes if run.accumulator.parts else 0,
            )
        )

    def _drop_run(self, request: Request) -> Answer:
        self._drop(request.message.drop_run.run_id)
        return plain_answer(empty=training_pb2.Empty())

    def _drop(self, run_id: str) -> None:
        run = self.context.runs.pop(run_id, None)
        if run is not None:
            self.context.residency.remove(run_id)
            self._shared.forget(run_id)
            self.context.store.fences.pop(run_id, None)
            run.close()
            self.context.references.keep_model(run.policy.split_model)

    def _share_weights(self, request: Request) -> Answer:
        share = request.message.share_weights
        run = self.context.held(share.run_id)
        self.context.residency.use(run)
        return plain_answer(shared_weights=self._shared.share(run, share.name, share.through_store))

    def _check_upload(self, request: Request) -> Answer:
        return plain_answer(
            upload=check_upload(self.context.pool, self._adapter_shapes, request.message.check_upload.request)
        )

    def _import_upload(self, request: Request) -> Answer:
        upload = request.message.import_upload.upload
        self.context.agreement.once(lambda: import_upload(self.context.pool, self._adapter_shapes, self._store, upload))
        return plain_answer(empty=training_pb2.Empty())

    def _model_info(self, name: str) -> training_pb2.ModelInfo:
        facts = self.context.pool.facts(name)
        return training_pb2.ModelInfo(
            name=name,
            architecture=facts.architecture,
            num_parameters=facts.num_parameters,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            dtype=facts.dtype,
            has_tokenizer=name in self.context.tokenizer_files,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            takes_images=facts.takes_images,
            image_token_id=facts.image_token_id,
        )


def device_of(settings: EngineSettings, rank: int) -> str:
    """The device of a process of an engine."""
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return f"cuda:{rank}" if settings.num_ranks > 1 and device == "cuda" else device


def loss_info(loss: LossSpec) -> training_pb2.LossInfo:
    """Convert a loss's specification to its wire form."""
    return training_pb2.LossInfo(
        name=loss.name,
        summary=loss.summary,
        formula=loss.formula,
        reference=loss.reference,
        fields=[
            training_pb2.LossField(
                name=field.name,
                dtype=field.dtype,
                shapes=field.shapes,
                required=field.required,
                description=field.description,
                aligned_with=field.aligned_with,
                padding_mask=field.padding_mask,
            )
            for field in loss.fields
        ],
        config_schema_json=json.dumps(loss.config.model_json_schema()),
        metrics=loss.metrics,
        layout=loss.layout,
        head=loss.head,
        whole_batch=loss.whole_batch,
    )
