"""What operations give back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb

Array = npt.NDArray[Any]
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Timings:
    """Seconds that an operation took on the server.

    Attributes:
        queue_s: from accepted to started.
        engine_s: computing; of what was computed together with other runs, this operation's share by tokens.
    """

    queue_s: float
    engine_s: float


@dataclass(frozen=True)
class LossResult:
    """What a forward, with or without gradients, gave. ``result["name"]`` is ``result.metrics["name"]``.

    Attributes:
        loss: the loss of this batch, in the loss's unit (``causal_lm``: nats a token); None where none was asked for.
        metrics: by name, ``"loss"`` first and then in alphabetical order; ``list_losses`` says what each is.
        outputs: what was asked for with ``outputs``: for each sequence an array over its scored tokens, float32; for
            ``"rewards"`` one array ``[sequences]``.
        num_sequences: sequences that went through the model.
        num_tokens: tokens that went through the model.
        num_loss_tokens: tokens that were scored.
        timings: seconds in the queue and in the engine.
        num_microbatches: in how many parts the engine computed the batch.
        recomputed: whether the batch exceeded the activation budget, so that part of it was computed twice.
        warnings: sentences for a person.
        grouped_runs: with how many runs, this one among them, it went through the base model at once; 0: alone.
    """

    loss: float | None
    metrics: Mapping[str, float]
    outputs: Mapping[str, Any]
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    timings: Timings
    num_microbatches: int = 1
    recomputed: bool = False
    warnings: tuple[str, ...] = ()
    grouped_runs: int = 0

    def __getitem__(self, metric: str) -> float:
        return self.metrics[metric]

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> LossResult:
        body = result.loss
        loss = body.loss if body.HasField("loss") else None
        return LossResult(
            loss=loss,
            metrics=({} if loss is None else {"loss": loss})
            | {name: body.metrics[name] for name in sorted(body.metrics)},
            outputs={name: column.rows() if column.levels else column.values for name, column in columns.items()},
            num_sequences=body.num_sequences,
            num_tokens=body.num_tokens,
            num_loss_tokens=body.num_loss_tokens,
            timings=Timings(result.timings.queue_s, result.timings.engine_s),
            num_microbatches=body.num_microbatches,
            recomputed=body.recomputed,
            warnings=tuple(body.warnings),
            grouped_runs=body.grouped_runs,
        )


@dataclass(frozen=True)
class OptimStepResult:
    """What an optimizer step did.

    Attributes:
        grad_norm: Euclidean norm of the whole gradient, before clipping.
        learning_rate: the one that was used.
        step: optimizer steps of this run so far, this one included.
        skipped: whether the gradient was not finite and the step was skipped, as asked.
        timings: seconds in the queue and in the engine.
        num_accumulated: how many operations it took the gradients of.
    """

    grad_norm: float
    learning_rate: float
    step: int
    skipped: bool
    timings: Timings
    num_accumulated: int = 0

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> OptimStepResult:
        body = result.optim_step
        timings = Timings(result.timings.queue_s, result.timings.engine_s)
        return OptimStepResult(
            body.grad_norm, body.learning_rate, body.step, body.skipped, timings, body.num_accumulated
        )


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        token_ids: ``[tokens]`` int, the end token included where there is one.
        logprobs: ``[tokens]`` float32, in nats: what ``compute_logprobs`` gives at the sampling temperature (at 1 where
            that is 0); ``top_k`` and ``top_p`` do not enter.
        text: decoded by the server; None where the model has no tokenizer.
        stop_reason: ``"eos"``, ``"stop"`` or ``"length"``.
    """

    token_ids: Array
    logprobs: Array
    text: str | None
    stop_reason: str


@dataclass(frozen=True)
class SampleResult:
    """Continuations: ``samples[p][k]`` is the k-th of prompt p."""

    samples: list[list[Sample]]
    num_prompt_tokens: int
    num_sampled_tokens: int
    timings: Timings

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> SampleResult:
        body = result.sample
        per_prompt, lengths = columns["token_ids"].levels
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        tokens, logprobs = columns["token_ids"].values, columns["logprobs"].values
        texts: Iterable[str | None] = body.texts or itertools.repeat(None, len(ends))
        flat = [
            Sample(tokens[start:end], logprobs[start:end], text, reason)
            for start, end, text, reason in zip([0, *ends[:-1]], ends, texts, body.stop_reasons, strict=False)
        ]
        starts = np.cumsum(per_prompt, dtype=np.int64) - per_prompt
        return SampleResult(
            samples=[
                flat[start : start + size] for start, size in zip(starts.tolist(), per_prompt.tolist(), strict=True)
            ],
            num_prompt_tokens=body.num_prompt_tokens,
            num_sampled_tokens=body.num_sampled_tokens,
            timings=Timings(result.timings.queue_s, result.timings.engine_s),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A saved state of a run. ``path`` is accepted wherever a model or a checkpoint is asked for.

    Attributes:
        path: ``"RUN_ID/NAME"``.
        name: its name in the run.
        step: optimizer steps it contains.
        seq: operations it contains.
        size_bytes: on the server's disk.
        created_at: Unix time, seconds.
        note: as given when it was saved.
    """

    path: str
    name: str
    step: int
    seq: int
    size_bytes: int
    created_at: float
    note: str = ""

    @staticmethod
    def from_message(message: pb.Checkpoint) -> Checkpoint:
        return Checkpoint(
            message.path,
            message.name,
            message.step,
            message.seq,
            message.size_bytes,
            message.created_at,
            message.note,
        )

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> Checkpoint:
        return Checkpoint.from_message(result.checkpoint)
