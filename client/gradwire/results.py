"""Results of operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import html
from gradwire.errors import did_you_mean

Array = npt.NDArray[Any]
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Timings:
    """Seconds that an operation took on the server.

    Attributes:
        queue_s: From acceptance to start.
        engine_s: Compute time. If runs were computed together, this operation's share by number of tokens.
    """

    queue_s: float
    engine_s: float


@dataclass(frozen=True)
class LossResult:
    """The result of a forward, with or without gradients. ``result["name"]`` is ``result.metrics["name"]``.

    Attributes:
        loss: The loss of this batch in the loss's unit (``causal_lm``: nats per token); None if no loss was requested.
        metrics: Metrics by name, ``"loss"`` first, then alphabetical; ``list_losses`` describes each.
        outputs: The requested ``outputs``: per sequence a float32 array over its scored tokens; for
            ``"rewards"`` one array ``[sequences]``.
        num_sequences: Sequences that went through the model.
        num_tokens: Tokens of the sequences.
        num_loss_tokens: Scored tokens.
        timings: Seconds in the queue and in the engine.
        num_microbatches: Number of micro-batches that the engine computed.
        recomputed: Whether the batch exceeded the activation budget, so that its forward was computed twice.
        warnings: Warnings for people, one sentence each.
        grouped_runs: Number of runs, this one included, that shared one pass through the base model; 0: not grouped.
        num_computed_tokens: Tokens that the model computed, as usage counts them: what sequences of a micro-batch have
            in common at their beginning counts once.
        activations: Number of micro-batches by what became of their activations: ``"keep"``, ``"recompute"``,
            ``"offload"`` (to host memory), ``"recompute+offload"``; with ``"+chunk"`` feed-forward layers computed
            their tokens in chunks. Empty without a backward pass.
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
    activations: Mapping[str, int] = field(default_factory=dict)
    num_computed_tokens: int = 0

    def __getitem__(self, metric: str) -> float:
        if metric not in self.metrics:
            known = ", ".join(self.metrics)
            raise KeyError(f"there is no metric {metric!r}{did_you_mean(metric, self.metrics)}; there are {known}")
        return self.metrics[metric]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.metrics)

    def _repr_html_(self) -> str:
        rows = [*self.metrics.items(), *_counts(self, "num_sequences", "num_tokens", "num_loss_tokens")]
        rows += [("seconds", self.timings.engine_s)]
        return html.table(("metric", "value"), rows, caption="LossResult", notes=self.warnings)

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> LossResult:
        return LossResult(**_loss_fields(result.loss, result.timings, columns))


@dataclass(frozen=True)
class OptimStepResult:
    """The result of an optimizer step.

    Attributes:
        grad_norm: Euclidean norm of the whole gradient before clipping.
        learning_rate: The learning rate of this step.
        step: Number of optimizer steps of this run so far, including this one.
        skipped: Whether the step was skipped because the gradient was not finite (``on_nonfinite="skip"``).
        timings: Seconds in the queue and in the engine.
        num_accumulated: Number of operations whose gradients were accumulated.
    """

    grad_norm: float
    learning_rate: float
    step: int
    skipped: bool
    timings: Timings
    num_accumulated: int = 0

    def _repr_html_(self) -> str:
        rows = _counts(self, "step", "grad_norm", "learning_rate", "num_accumulated")
        notes = ("The gradient was not finite, and the step was skipped.",) if self.skipped else ()
        return html.table(
            ("", "value"), [*rows, ("seconds", self.timings.engine_s)], caption="OptimStepResult", notes=notes
        )

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> OptimStepResult:
        body = result.optim_step
        timings = Timings(result.timings.queue_s, result.timings.engine_s)
        return OptimStepResult(
            body.grad_norm, body.learning_rate, body.step, body.skipped, timings, body.num_accumulated
        )


@dataclass(frozen=True, kw_only=True)
class TrainStepResult(LossResult):
    """The result of a ``train_step``: that of a ``forward_backward``, and of the optimizer step behind it.

    Attributes:
        grad_norm: Euclidean norm of the whole gradient before clipping.
        learning_rate: The learning rate of the step.
        step: Number of optimizer steps of this run so far, including this one.
        skipped: Whether the step was skipped because the gradient was not finite (``on_nonfinite="skip"``).
        num_accumulated: Number of operations whose gradients were accumulated, this one included.
    """

    grad_norm: float
    learning_rate: float
    step: int
    skipped: bool = False
    num_accumulated: int = 1

    def _repr_html_(self) -> str:
        rows = [*self.metrics.items(), *_counts(self, "num_sequences", "num_tokens", "num_loss_tokens")]
        rows += [*_counts(self, "step", "grad_norm", "learning_rate", "num_accumulated")]
        notes = self.warnings + (("The gradient was not finite, and the step was skipped.",) if self.skipped else ())
        rows += [("seconds", self.timings.engine_s)]
        return html.table(("metric", "value"), rows, caption="TrainStepResult", notes=notes)

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> TrainStepResult:
        step = result.train_step.optim_step
        return TrainStepResult(
            **_loss_fields(result.train_step.loss, result.timings, columns),
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            step=step.step,
            skipped=step.skipped,
            num_accumulated=step.num_accumulated,
        )


def _loss_fields(body: pb.LossResult, timings: pb.Timings, columns: Columns) -> dict[str, Any]:
    loss = body.loss if body.HasField("loss") else None
    return {
        "loss": loss,
        "metrics": ({} if loss is None else {"loss": loss})
        | {name: body.metrics[name] for name in sorted(body.metrics)},
        "outputs": {name: column.rows() if column.levels else column.values for name, column in columns.items()},
        "num_sequences": body.num_sequences,
        "num_tokens": body.num_tokens,
        "num_loss_tokens": body.num_loss_tokens,
        "timings": Timings(timings.queue_s, timings.engine_s),
        "num_microbatches": body.num_microbatches,
        "recomputed": body.recomputed,
        "warnings": tuple(body.warnings),
        "grouped_runs": body.grouped_runs,
        "activations": dict(body.activations),
        "num_computed_tokens": body.num_computed_tokens,
    }


def _counts(result: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, getattr(result, name)) for name in names]


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        token_ids: ``[tokens]`` int, including the end token if there is one.
        logprobs: ``[tokens]`` float32, in nats: equal to ``compute_logprobs`` at the sampling temperature (at 1 if
            that is 0); ``top_k``, ``top_p``, ``min_p``, penalties, biases and schemas have no effect on them.
        text: The decoded text; None if the model has no tokenizer.
        stop_reason: ``"eos"``, ``"stop"`` or ``"length"``.
        top_token_ids: ``[tokens, k]`` int, the most probable tokens in each place, most probable first; None without
            ``top_logprobs``.
        top_logprobs: ``[tokens, k]`` float32, their log-probabilities, like ``logprobs``.
    """

    token_ids: Array
    logprobs: Array
    text: str | None
    stop_reason: str
    top_token_ids: Array | None = None
    top_logprobs: Array | None = None


@dataclass(frozen=True)
class SampledToken:
    """One token of a stream.

    Attributes:
        token_id: The token.
        logprob: Its log-probability, as in :class:`Sample`.
        text: The next piece of the stream's text. It may lag behind the tokens, where a token is a part of a character
            or could belong to a stop string; all tokens' texts together are the sample's.
        stop_reason: With the last token, as in :class:`Sample`; else "".
        top_token_ids: ``[k]`` int, the most probable tokens in its place; None without ``top_logprobs``.
        top_logprobs: ``[k]`` float32, their log-probabilities.
    """

    token_id: int
    logprob: float
    text: str
    stop_reason: str
    top_token_ids: Array | None = None
    top_logprobs: Array | None = None

    @staticmethod
    def from_wire(delta: pb.SampleDelta) -> list[SampledToken]:
        count = len(delta.token_ids)
        top_ids: list[Array] | list[None] = [None] * count
        top_logprobs: list[Array] | list[None] = [None] * count
        if delta.top_token_ids:
            top_ids = list(np.array(delta.top_token_ids, np.int32).reshape(count, -1))
            top_logprobs = list(np.array(delta.top_logprobs, np.float32).reshape(count, -1))
        last = count - 1
        return [
            SampledToken(
                token_id,
                delta.logprobs[place],
                delta.texts[place],
                delta.stop_reason if place == last else "",
                top_ids[place],
                top_logprobs[place],
            )
            for place, token_id in enumerate(delta.token_ids)
        ]


@dataclass(frozen=True)
class SampleResult:
    """Continuations: ``samples[p][k]`` is the k-th of prompt p.

    Attributes:
        engines: Number of the engine that has generated each prompt's samples; empty if one has generated all.
        step: Number of optimizer steps of the run whose weights sampled; None for those of a model or a checkpoint.
        num_cached_tokens: Number of the prompts' tokens whose keys and values an earlier request had left.
    """

    samples: list[list[Sample]]
    num_prompt_tokens: int
    num_sampled_tokens: int
    timings: Timings
    engines: list[int] = field(default_factory=list)
    step: int | None = None
    num_cached_tokens: int = 0

    @staticmethod
    def from_wire(result: pb.OperationResult, columns: Columns) -> SampleResult:
        body = result.sample
        per_prompt, lengths = columns["token_ids"].levels
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        tokens, logprobs = columns["token_ids"].values, columns["logprobs"].values
        texts: Iterable[str | None] = body.texts or itertools.repeat(None, len(ends))
        top_ids, top_logprobs = (
            columns[name].values if name in columns else None for name in ("top_token_ids", "top_logprobs")
        )
        flat = [
            Sample(
                tokens[start:end],
                logprobs[start:end],
                text,
                reason,
                None if top_ids is None else top_ids[start:end],
                None if top_logprobs is None else top_logprobs[start:end],
            )
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
            engines=[part.engine for part in body.parts for _ in range(part.num_prompts)],
            step=body.step if body.HasField("step") else None,
            num_cached_tokens=body.num_cached_tokens,
        )


@dataclass(frozen=True)
class Checkpoint:
    """A saved state of a run. ``path`` is accepted wherever a model or a checkpoint is expected.

    Attributes:
        path: ``"RUN_ID/NAME"``.
        name: Name in the run.
        step: Number of optimizer steps it contains.
        seq: Number of the last operation it contains.
        size_bytes: Size on the server's disk.
        created_at: Unix time in seconds.
        note: The note given when it was saved.
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
