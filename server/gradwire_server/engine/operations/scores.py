"""Scores of a batch: ``forward``, and the two halves of a loss that the client computes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from gradwire_losses import host
from gradwire_losses.batch import Batch, sent
from gradwire_losses.outputs import settled
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.executor import executor_of
from gradwire_server.engine.lanes import Key
from gradwire_server.engine.model.layers.routers import PROBABILITIES
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.scoring.forward import Scoring, score_batch
from gradwire_server.engine.scoring.planner import Budget, split_for_scores, split_for_training
from gradwire_server.engine.scoring.score_types import SEQUENCE_SCORES, check_candidates, check_scores
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import ADVANTAGES, Step, checked, compared_with, loss_on_batch
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector
from gradwire_server.engine.training.columns import PLAIN, read_columns, read_loss, refuse_part
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores
from gradwire_server.engine.training.finite import check_finite
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported

CUSTOM: Key = ("custom", "weight")


def forward(context: EngineContext, run: EngineRun, seq: int, call: training_pb2.LossCall, columns: Columns) -> Outcome:
    """Compute scores, and a loss if one is named, without gradients."""
    policy = context.references.resolve(call.model, run, field="model").policy if call.model else run.policy
    budget, agreement = context.budget, context.agreement
    if not call.loss_fn:
        refuse_part(call)
        batch = read_columns(PLAIN, columns, policy, call.maybe_padded)
        scoring = Scoring(policy, batch, frozenset(call.outputs), _temperature(call.temperature), None, budget)
        return loss_outcome(evaluate(scoring, outputs=call.outputs, agreement=agreement))
    loss, config = read_loss(call)
    reference, teacher = compared_with(context.references, run, config, budget)
    refuse_part(call)
    batch = read_columns(loss, columns, policy, call.maybe_padded)
    _temperature(call.temperature)  # the loss has its own
    step = checked(
        loss, config, policy, batch, outputs=call.outputs, reference=reference, teacher=teacher, budget=budget
    )
    return loss_outcome(evaluate(step.scoring, step, outputs=call.outputs, agreement=agreement))


def kept_forward(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.KeptForward, columns: Columns
) -> Outcome:
    """Compute scores and keep their graph for :func:`backward`: the first half of a loss on the client."""
    run.kept[seq], evaluation = keep_scores(
        run.policy,
        read_columns(PLAIN, columns, run.policy, call.maybe_padded),
        list(call.scores) or ["logprobs"],
        temperature=_temperature(call.temperature),
        budget=context.budget,
        dropout_seed=run.dropout_seed,
        agreement=context.agreement,
    )
    return loss_outcome(evaluation)


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
    batch = kept.scorings[0].batch
    gradients: dict[str, Tensor] = {}
    for name, column in columns.items():
        score = name.removeprefix("grad_")
        lengths = batch.row_lengths.numpy()
        if column.levels and not np.array_equal(column.levels[-1], lengths):
            raise invalid(f"{name} has other row lengths than the scores of forward {call.forward_seq}", name)
        gradients[score] = torch.from_numpy(column.values.astype(np.float32))
    metrics = client_backward(kept, gradients, call.weight, run.accumulator)
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


def loss_outcome(evaluation: LossEvaluation) -> Outcome:
    """The outcome of an evaluation, with the scores asked for."""
    result = training_pb2.LossResult(
        metrics=evaluation.metrics,
        num_sequences=evaluation.num_sequences,
        num_tokens=evaluation.num_tokens,
        num_computed_tokens=evaluation.num_computed_tokens,
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


def evaluate(
    scoring: Scoring, step: Step | None = None, *, outputs: Collection[str] = (), agreement: Agreement | None = None
) -> LossEvaluation:
    """Compute scores, and a step's loss if given, without gradients or dropout.

    Args:
        scoring: The scores, which are those of the step.
        outputs: Names of the scores to return.
        agreement: This process's agreement with the others of the engine; by default it is alone.
    """
    sums = LossSums(step.loss.name if step is not None else "")
    scores = score_batch(scoring, agreement=agreement)
    if step is not None:
        output = loss_on_batch(step, scores)
        sums.add(output)
        if output.advantages is not None:
            scores[ADVANTAGES] = output.advantages
    copies = sums.settle(outputs={name: scores[name] for name in outputs if name in scores})
    micros = split_for_scores(scoring.policy, scoring.batch, scoring.budget)
    return reported(scoring.batch, copies, micros, sums if step is not None else None)


def keep_scores(
    policy: Policy,
    batch: Batch,
    names: Collection[str],
    *,
    temperature: float = 1.0,
    budget: Budget,
    dropout_seed: str = "",
    agreement: Agreement | None = None,
) -> tuple[DifferentiableScores, LossEvaluation]:
    """Compute scores for a loss on the client and keep their graph for :func:`custom_backward`."""
    check_scores(policy, names, field="scores")
    check_candidates(batch, names)
    scoring = Scoring(policy, batch, names, temperature, None, budget)
    micros = split_for_training(policy, batch, budget)
    executor = executor_of(budget.lanes, agreement)
    kept = DifferentiableScores([scoring], [micros], dropout_seed=dropout_seed, executor=executor)
    (scores,) = kept.by_name
    copies = host.fetched([scores[name] for name in names])
    evaluation = reported(batch, dict(zip(names, copies, strict=True)), micros, None)
    return kept, replace(evaluation, recomputed=kept.recomputed, activations=kept.activations)


def client_backward(
    kept: DifferentiableScores, gradients: Mapping[str, Tensor], weight: float, accumulator: GradientAccumulator
) -> dict[str, float]:
    """Add the gradient of the client's loss, times ``weight``, to the accumulator.

    In a mixture of experts, that of the load-balancing loss is added too, if the run has one.

    Args:
        gradients: Score name -> the loss's gradient in that score, flat like the score.
        weight: Count that the loss averages over; calls of one accumulation are averaged by it.

    Returns:
        Metrics of the routers; empty for a model without.

    Raises:
        OperationError: INVALID_ARGUMENT, or NON_FINITE with the row at fault.
    """
    if not 0 < weight < math.inf:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"weight is {weight}; it is what the loss averages over, and positive",
            field="weight",
            rule="weight > 0",
        )
    (scoring,), (scores,) = kept.scorings, kept.by_name
    policy, batch = scoring.policy, scoring.batch
    for name, gradient in gradients.items():
        if name not in scores or gradient.shape != scores[name].shape:
            there = f"{tuple(scores[name].shape)}" if name in scores else "not among the scores asked for"
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"a gradient of shape {tuple(gradient.shape)} came for {name}, which is {there}",
                field=f"grad_{name}",
                rule="shaped as the scores were",
            )
    check_finite(batch, gradients, torch.arange(batch.num_examples), "the gradient that the client computed for")
    with GradientCollector(policy.trainable_parameters(), kept.executor) as collector:
        moved = {name: sent(gradient, policy.device) for name, gradient in gradients.items()}
        if kept.routers is not None and policy.router_aux_loss_coef:
            moved[PROBABILITIES] = kept.routers.balance_gradient() * policy.router_aux_loss_coef
        kept.backward([collector], [{CUSTOM: moved}])
    collector.share(policy.device)
    if not collector.finite():
        raise OperationError(
            training_pb2.ERROR_CODE_NON_FINITE,
            "the gradient with respect to the weights is not finite, though that of the scores is; nothing was "
            "accumulated. A lower learning rate, or float32 weights, may help",
        )
    accumulator.merge(collector.by_key, {CUSTOM: weight}, scale=weight)
    figures, _ = settled({} if kept.routers is None else kept.routers.metrics())
    return {name: metric.value() for name, metric in figures.items()}


def _temperature(given: float) -> float:
    if not 0 <= given < float("inf"):
        raise invalid(f"temperature is {given}; it divides the logits, and is positive", "temperature")
    return given or 1.0
