"""The engine: models, runs and references of one process, and the answer to each request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradwire_losses.registry import LossSpec, all_losses
from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.model.pool import Dtype, ModelPool
from gradwire_server.engine.model.tokenizers import TextTokenizer, find_tokenizer, load_tokenizer
from gradwire_server.engine.operations import dispatch as operations
from gradwire_server.engine.operations.outcome import Columns, Outcome
from gradwire_server.engine.operations.samples import begin_outside
from gradwire_server.engine.sampling.choice import make_sampler
from gradwire_server.engine.sampling.sampler import Sampler
from gradwire_server.engine.scoring.memory import Memory
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import References
from gradwire_server.engine.state.snapshot import restore
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.observability import logs
from gradwire_server.observability.tracing import Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """A reply, and the buffers of its payload."""

    reply: engine_pb2.EngineReply
    buffers: list[memoryview]


class Engine:
    """Answers one ordered stream of requests.

    Args:
        models: name -> folder or hub name; the engine says at once what they are.
        allowed: more of them, which are read when they are first named.
        state_dir: where checkpoints and exports are.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; a GPU by default where there is one.
        dtype: of the weights, or ``"mixed"``: see :class:`.pool.ModelPool`, as for ``compiled``.
        sampler: ``"local"`` or ``"vllm"``.
        microbatch_tokens, activation_bytes: what an operation may hold; found out where None (see :mod:`.memory`).
        reference_cache_bytes: of reference models beside what runs hold.
        tracing: where the spans of operations go; nowhere by default.

    Attributes:
        host, store, references, sampler, memory, tracing: its parts, for the operations.
        budget: of the operation that is carried out.
        runs: by id.
        marks: where it says what it has begun; None without a front.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        state_dir: Path,
        *,
        allowed: Mapping[str, str] | None = None,
        device: str | None = None,
        dtype: Dtype | None = None,
        compiled: bool = False,
        sampler: str = "local",
        microbatch_tokens: int | None = None,
        activation_bytes: int | None = None,
        reference_cache_bytes: int = 8 << 30,
        tracing: Tracing | None = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._models, usable = list(models), {**(allowed or {}), **models}
        self.pool = ModelPool(usable, device, dtype, compiled=compiled)
        self.store = CheckpointStore(state_dir)
        self.sampler: Sampler[Any] = make_sampler(sampler, self.pool)
        self.references = References(
            self.pool, self.store, cache_bytes=reference_cache_bytes, in_use=lambda policy: self.sampler.uses(policy)
        )
        self.memory = Memory(self.pool.device, microbatch_tokens, activation_bytes)
        self.budget = self.memory.most
        self.tracing = tracing or Tracing()
        self.runs: dict[str, EngineRun] = {}
        self.marks: CrashMarks | None = None
        self._tokenizer_files = {name: file for name, path in usable.items() if (file := find_tokenizer(path))}
        self._handlers: Mapping[str, Callable[[engine_pb2.EngineRequest, Columns], Answer]] = {
            "create_run": self._create_run,
            "drop_run": self._drop_run,
            "operation": self.carry_out,
            "sample": self._sample,
            "verify_checkpoint": self._verify_checkpoint,
            "shutdown": lambda request, columns: _plain(empty=training_pb2.Empty()),
        }

    def tokenizer(self, model: str) -> TextTokenizer | None:
        """The tokenizer of a model; None where it has none."""
        file = self._tokenizer_files.get(model)
        return load_tokenizer(file) if file else None

    def hello(self) -> engine_pb2.EngineHello:
        """What the engine holds.

        Raises:
            OperationError: for a model that cannot be used.
        """
        device = str(self.pool.device)
        if self.pool.device.type == "cuda":
            device = f"{device} ({torch.cuda.get_device_name(self.pool.device)})"
        return engine_pb2.EngineHello(
            device=device,
            models=[self._model_info(name) for name in self._models],
            losses=[loss_info(loss) for loss in all_losses()],
            tokenizer_files={name: str(file) for name, file in self._tokenizer_files.items()},
        )

    def answer(
        self, request: engine_pb2.EngineRequest, columns: Columns, decode_error: codec.CodecError | None = None
    ) -> Answer:
        """Carries out a request. Never raises for what a request can bring about.

        Args:
            columns: the payload of an operation.
            decode_error: why there are no columns; the operation fails with it.

        Raises:
            torch.AcceleratorError: when the device is lost and the process with it.
        """
        kind = request.WhichOneof("kind") or ""
        try:
            if kind not in self._handlers:
                raise ValueError(f"a request of unknown kind {kind!r}")
            if not self.begins(request):
                answer = _plain(not_started=training_pb2.Empty())
            elif decode_error is not None:
                answer = self.failed(request.operation, decode_error, 0.0)
            else:
                with logs.about(request.operation.run_id, request.operation.seq):
                    answer = self._handlers[kind](request, columns)
        except Exception as error:  # the boundary: whatever it is, the engine goes on and the caller hears of it
            if is_fatal(error):
                raise
            answer = Answer(engine_pb2.EngineReply(error=to_error(error, f"request {kind}")), [])
        answer.reply.id = request.id
        return answer

    def begins(self, request: engine_pb2.EngineRequest) -> bool:
        """Whether a request is to be carried out, now: its turn has come. It is marked as begun then; otherwise the
        answer is ``not_started``."""
        run = self.runs.get(request.operation.run_id)
        unless_failed = request.operation.unless_failed
        if unless_failed and run is not None and run.failed_seq >= unless_failed:
            return False
        return self.marks is None or self.marks.begin(request.id)

    # -------------------------------------------------------------- requests

    def _create_run(self, request: engine_pb2.EngineRequest, columns: Columns) -> Answer:
        create = request.create_run
        self._drop(create.run_id)
        run = EngineRun(self.pool, create.run_id, create.config)
        try:
            if create.checkpoint:
                restore(
                    run,
                    self.store,
                    create.checkpoint,
                    weights_only=create.weights_only,
                    fresh_head=create.fresh_head,
                )
        except Exception:  # whatever stopped it, what the run took of the shared model is given back
            run.close()
            raise
        self.runs[create.run_id] = run
        return _plain(
            run_created=engine_pb2.EngineRunCreated(
                num_trainable_parameters=run.policy.num_trainable_parameters, step=run.step, seq=run.seq
            )
        )

    def _drop_run(self, request: engine_pb2.EngineRequest, columns: Columns) -> Answer:
        self._drop(request.drop_run.run_id)
        return _plain(empty=training_pb2.Empty())

    def _drop(self, run_id: str) -> None:
        run = self.runs.pop(run_id, None)
        if run is not None:
            run.close()
            self.references.keep_model(run.config.base_model)

    def carry_out(self, request: engine_pb2.EngineRequest, columns: Columns) -> Answer:
        """Carries out a run's operation that has begun."""
        asked = request.operation
        run = self.runs.get(asked.run_id)
        if run is None:
            raise OperationError(training_pb2.ERROR_CODE_UNKNOWN_RUN, f"the engine holds no run {asked.run_id!r}")
        run.drop_accumulated(asked.dropped_step)
        start = time.perf_counter()
        kind = asked.operation.WhichOneof("kind") or "unknown"
        crash_point("engine.before_operation")
        try:
            with self.tracing.span(f"gradwire.engine.{kind}", asked.traceparent, run=asked.run_id, seq=asked.seq):
                outcome = operations.carry_out(self, run, asked.seq, asked.operation, columns)
                answer = succeeded(outcome, asked.seq, time.perf_counter() - start)
        except Exception as error:  # the boundary, as in answer(): the operation's result says what went wrong
            if is_fatal(error):
                raise
            return self.failed(asked, error, time.perf_counter() - start)
        finally:
            run.seq = asked.seq
        crash_point("engine.before_reply")
        return answer

    def failed(self, asked: engine_pb2.EngineOperation, error: Exception, seconds: float) -> Answer:
        """The answer to an operation that failed; its run knows of it from now on."""
        if asked.run_id in self.runs:
            self.runs[asked.run_id].failed_seq = asked.seq
        what = f"{asked.operation.WhichOneof('kind')} {asked.seq} of {asked.run_id}"
        result = training_pb2.OperationResult(
            seq=asked.seq,
            status=training_pb2.STATUS_FAILED,
            error=to_error(error, what),
            timings=training_pb2.Timings(engine_s=seconds),
        )
        return Answer(engine_pb2.EngineReply(result=result), [])

    def _sample(self, request: engine_pb2.EngineRequest, columns: Columns) -> Answer:
        start = time.perf_counter()
        started = begin_outside(self, request.sample)
        while not started.job.done:
            self.sampler.step()
        return succeeded(started.outcome(), 0, time.perf_counter() - start)

    def _verify_checkpoint(self, request: engine_pb2.EngineRequest, columns: Columns) -> Answer:
        manifest = self.store.verify(request.verify_checkpoint.checkpoint)
        return _plain(result=training_pb2.OperationResult(checkpoint=manifest.to_proto()))

    def _model_info(self, name: str) -> training_pb2.ModelInfo:
        facts = self.pool.facts(name)
        return training_pb2.ModelInfo(
            name=name,
            architecture=facts.architecture,
            num_parameters=facts.num_parameters,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            dtype=facts.dtype,
            has_tokenizer=name in self._tokenizer_files,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
        )


def _plain(**kind: object) -> Answer:
    return Answer(engine_pb2.EngineReply(**kind), [])  # type: ignore[arg-type]  # one of the reply's kinds


def succeeded(outcome: Outcome, seq: int, seconds: float) -> Answer:
    """The answer to what was carried out, with number ``seq`` where it is a run's operation."""
    specs, buffers = codec.encode(outcome.columns)
    result = outcome.result
    result.seq = seq
    result.status = training_pb2.STATUS_SUCCEEDED
    result.timings.engine_s = seconds
    result.tensors.extend(specs)
    result.payload_bytes = sum(buffer.nbytes for buffer in buffers)
    return Answer(engine_pb2.EngineReply(result=result), buffers)


def loss_info(loss: LossSpec) -> training_pb2.LossInfo:
    """A loss as it is listed on the wire."""
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
    )
