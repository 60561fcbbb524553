"""Scores and losses without a backward pass of the server's loss, and the two halves of a loss the client computes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from gradwire_losses import host
from gradwire_losses.batch import Batch, sent
from gradwire_losses.outputs import settled
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.lanes import Key, Lanes
from gradwire_server.engine.model.layers.routers import PROBABILITIES
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.forward import Reading, score_batch
from gradwire_server.engine.scoring.parts import Part
from gradwire_server.engine.scoring.planner import Budget, split_for_scores, split_for_training
from gradwire_server.engine.scoring.score_types import check_candidates, check_scores
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores
from gradwire_server.engine.training.loss_call import ADVANTAGES, LossCall, check_finite
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported

CUSTOM: Key = ("custom", "weight")


def forward(
    policy: Policy,
    batch: Batch,
    call: LossCall | None = None,
    *,
    outputs: Collection[str] = (),
    temperature: float = 1.0,
    budget: Budget,
    agreement: Agreement | None = None,
) -> LossEvaluation:
    """Compute scores, and a loss if given, without gradients or dropout.

    Args:
        agreement: This process's agreement with the others of the engine; by default it is alone.
        call: The loss with its arguments.
        outputs: Names of the scores to return.
        temperature: Divides the logits if there is no loss; a loss has its own argument for it.

    Raises:
        OperationError: UNSUPPORTED, INVALID_ARGUMENT, INVALID_BATCH.
    """
    names, teacher = frozenset(outputs), None
    on_batch = call.on(policy, batch, outputs) if call is not None else None
    sums = LossSums(call.loss.name if call is not None else "")
    if on_batch is not None:
        names, teacher, temperature = on_batch.names, on_batch.teacher, on_batch.temperature
    scores = score_batch(
        policy, batch, names, temperature=temperature, teacher=teacher, budget=budget, agreement=agreement
    )
    if on_batch is not None:
        value = on_batch.value(scores)
        sums.add(value)
        if value.advantages is not None:
            scores[ADVANTAGES] = value.advantages
    copies = sums.settle(outputs={name: scores[name] for name in outputs if name in scores})
    num_microbatches = len(split_for_scores(policy, batch, budget))
    return reported(batch, copies, num_microbatches, sums if call is not None else None)


def kept_forward(
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
    reading = Reading(policy, batch, names, temperature, None, budget)
    whole = Part(batch, split_for_training(policy, batch, budget))
    lanes = Lanes(budget.lanes, agreement)
    kept = DifferentiableScores([reading], [whole], dropout_seed=dropout_seed, lanes=lanes)
    (scores,) = kept.by_name
    copies = host.fetched([scores[name] for name in names])
    evaluation = reported(batch, dict(zip(names, copies, strict=True)), kept.num_microbatches, None)
    return kept, replace(evaluation, recomputed=kept.recomputed, activations=kept.activations)


def custom_backward(
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
    (reading,), (scores,) = kept.readings, kept.by_name
    policy, batch = reading.policy, reading.batch
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
    with GradientCollector(policy.trainable_parameters(), kept.lanes) as collector:
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
