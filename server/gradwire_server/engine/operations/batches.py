"""Operations on a batch: ``forward``, the halves of a loss that the client computes, and what training ones share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from gradwire_losses.registry import (
    DivergenceConfig,
    HeldReference,
    LossConfig,
    LossSpec,
    ReferenceConfig,
)
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.model.layers.routers import balance_hint
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.reading import PLAIN, read, read_loss, read_whole, refuse_part
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.scoring.score_types import SEQUENCE_SCORES
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import OFFLOADED
from gradwire_server.engine.state.references import Reference as FrozenReference
from gradwire_server.engine.training import forward_only as evaluate
from gradwire_server.engine.training.forward_backward import Training
from gradwire_server.engine.training.loss_call import LossCall, Reference
from gradwire_server.engine.training.loss_report import LossEvaluation


def prepare(context: EngineContext, run: EngineRun, call: training_pb2.LossCall, columns: Columns) -> Training:
    """Read and check a ``forward_backward``, within the engine's current budget.

    A run without a head gets a value head here if the loss needs one; whoever drops the operation undoes that.

    Raises:
        OperationError: The call or its batch is invalid.
    """
    loss, config = read_loss(call)
    if call.model:
        raise invalid("forward_backward trains the run's own weights; model is for forward", "model")
    batch = read_whole(run, call, columns)
    asked = LossCall(loss, config, _reference(context, run, config), _teacher(context, run, config))
    if asked.needs_added_head(run.policy, batch):
        run.add_value_head()
    on_batch = asked.on(run.policy, batch, call.outputs)
    return Training(
        on_batch,
        run.accumulator,
        budget=context.budget,
        dropout_seed=run.dropout_seed,
        agreement=context.agreement,
    )


def trained(run: EngineRun, training: Training, evaluation: LossEvaluation) -> Outcome:
    """Make the outcome of an operation whose gradient is accumulated."""
    loss = training.loss.call.loss
    run.accumulator.parts = None
    hints = run.advisor.hints(loss.name, loss.hints, evaluation.metrics, run.step)
    first = run.step == 0 and not training.counts_before
    if first and (said := balance_hint(run.policy.model, run.config, run.policy.router_aux_loss_coef)):
        hints = [*hints, said]
    if first and (draws := run.policy.draws):
        hints = [*hints, _draws(draws)]
    again = any(count and name == loss.name for (name, _), count in training.counts_before.items())
    if again and not loss.streams(training.loss.call.config, frozenset(training.loss.batch.fields)):
        hints = [*hints, _not_one_batch(loss)]
    return evaluated(replace(evaluation, warnings=[*evaluation.warnings, *hints]) if hints else evaluation)


def _not_one_batch(loss: LossSpec) -> str:
    return (
        f"{loss.name} takes a statistic of its batch ({loss.whole_batch}), and took one of each call since the last "
        "step; to take one of all, send them as one batch, or all but the last with accumulate=True"
    )


def _draws(names: Sequence[str]) -> str:
    return (
        f"random numbers are drawn in training, as this run asked for: {', '.join(names)}; so its log-probabilities "
        "differ from those of samples, of forward and of a reference, which draw nothing"
    )


def left_out(run: EngineRun, training: Training, error: OperationError) -> Outcome:
    """Make the outcome of a skipped batch with non-finite results: it counts 0, and a step may still follow."""
    batch = training.loss.batch
    run.accumulator.parts = None
    run.accumulator.merge({}, {(training.loss.call.loss.name, "skipped"): 0.0})
    result = training_pb2.LossResult(
        loss=math.nan,
        metrics={"loss": math.nan},
        num_sequences=batch.num_sequences,
        num_tokens=len(batch.input_ids),
        num_loss_tokens=batch.num_scored,
        warnings=[f"left out (on_nonfinite='skip'): {error.message}"],
    )
    return Outcome(training_pb2.OperationResult(loss=result))


def forward(context: EngineContext, run: EngineRun, seq: int, call: training_pb2.LossCall, columns: Columns) -> Outcome:
    """Compute scores, and a loss if one is named, without gradients."""
    policy = context.references.resolve(call.model, run, field="model").policy if call.model else run.policy
    asked = None
    if call.loss_fn:
        loss, config = read_loss(call)
        asked = LossCall(loss, config, _reference(context, run, config), _teacher(context, run, config))
    refuse_part(call)
    evaluation = evaluate.forward(
        policy,
        read(asked.loss if asked else PLAIN, columns, policy, call.maybe_padded),
        asked,
        outputs=call.outputs,
        temperature=_temperature(call.temperature),
        budget=context.budget,
        agreement=context.agreement,
    )
    return evaluated(evaluation)


def kept_forward(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.KeptForward, columns: Columns
) -> Outcome:
    """Compute scores and keep their graph for :func:`backward`: the first half of a loss on the client."""
    run.kept[seq], evaluation = evaluate.kept_forward(
        run.policy,
        read(PLAIN, columns, run.policy, call.maybe_padded),
        list(call.scores) or ["logprobs"],
        temperature=_temperature(call.temperature),
        budget=context.budget,
        dropout_seed=run.dropout_seed,
        agreement=context.agreement,
    )
    return evaluated(evaluation)


def backward(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.Backward, columns: Columns
) -> Outcome:
    """Apply the client's gradients to kept scores: the second half of a loss on the client."""
    kept = run.kept.pop(call.forward_seq, None)
    if call.abandoned:
        raise OperationError(
            training_pb2.ERROR_CODE_ABANDONED, f"the client gave up its half of the operation: {call.abandoned}"
        )
    if kept is None:
        raise invalid(
            f"forward {call.forward_seq} has no scores that wait for gradients: they take them once, and before the "
            "run's next operation",
            "forward_seq",
        )
    batch = kept.readings[0].batch
    gradients: dict[str, Tensor] = {}
    for name, column in columns.items():
        score = name.removeprefix("grad_")
        lengths = batch.row_lengths.numpy()
        if column.levels and not np.array_equal(column.levels[-1], lengths):
            raise invalid(f"{name} has other row lengths than the scores of forward {call.forward_seq}", name)
        gradients[score] = torch.from_numpy(column.values.astype(np.float32))
    metrics = evaluate.custom_backward(kept, gradients, call.weight, run.accumulator)
    result = training_pb2.LossResult(
        loss=call.loss,
        metrics={"loss": call.loss} | metrics,
        num_sequences=batch.num_sequences,
        num_tokens=len(batch.input_ids),
        num_loss_tokens=batch.num_scored,
        num_microbatches=kept.num_microbatches,
        recomputed=kept.recomputed,
        activations=kept.activations,
    )
    return Outcome(training_pb2.OperationResult(loss=result))


def evaluated(evaluation: LossEvaluation) -> Outcome:
    """The outcome of an evaluation, with the scores asked for."""
    result = training_pb2.LossResult(
        metrics=evaluation.metrics,
        num_sequences=evaluation.num_sequences,
        num_tokens=evaluation.num_tokens,
        num_loss_tokens=evaluation.num_loss_tokens,
        warnings=evaluation.warnings,
        num_microbatches=evaluation.num_microbatches,
        recomputed=evaluation.recomputed,
        activations=evaluation.activations,
    )
    if evaluation.loss is not None:
        result.loss = evaluation.loss
    lengths = evaluation.row_lengths.numpy().astype(np.uint32)
    columns = {
        name: Column(values.numpy(), () if name in SEQUENCE_SCORES else (lengths,))
        for name, values in evaluation.outputs.items()
    }
    return Outcome(training_pb2.OperationResult(loss=result), columns)


def _reference(context: EngineContext, run: EngineRun, config: LossConfig) -> Reference | None:
    if not isinstance(config, ReferenceConfig) or config.reference_model is None:
        return None
    reference = _resolved(context, run, config)
    budget = context.budget
    return lambda batch, temperature: context.references.logprobs(reference, batch, temperature, budget)


def _teacher(context: EngineContext, run: EngineRun, config: LossConfig) -> Policy | None:
    if not isinstance(config, DivergenceConfig) or config.reference_model is None:
        return None
    return _resolved(context, run, config).policy


def _resolved(context: EngineContext, run: EngineRun, config: ReferenceConfig) -> FrozenReference:
    asked = config.reference_model
    if isinstance(asked, HeldReference):
        held = OFFLOADED if asked.offload else asked.quantize
        return context.references.resolve(asked.name, run, dtype=config.reference_dtype, held=held)
    return context.references.resolve(asked or "", run, dtype=config.reference_dtype)


def _temperature(given: float) -> float:
    if not 0 <= given < float("inf"):
        raise invalid(f"temperature is {given}; it divides the logits, and is positive", "temperature")
    return given or 1.0
