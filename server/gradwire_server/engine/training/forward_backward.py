"""``forward_backward``: compute a loss and add its gradient to the run's accumulation.

Alone or in company, there is one pass: the parts of a batch, and of each the scores, the loss, and its gradient's way
back into the weights. Several LoRA runs on one base share the forward and the backward of the trunk; a run alone is a
group of one, which may have several parts.

The result always equals that of one loss call on the whole batch. A streaming loss is evaluated micro-batch by
micro-batch, and each graph is used and freed at once. Any other loss is evaluated once, on the scores of the whole
batch, and its gradient goes back through :class:`.differentiable_scores.DifferentiableScores`.

In a mixture of experts the load-balancing loss (:mod:`.routers`), if the run has one, is a function of the whole batch,
and needs every loss to be evaluated like one that does not stream. Its gradient joins that of the loss's first unit,
times what this unit is divided by.

Of a run with several lanes (:mod:`.lanes`), each process of the engine computes some micro-batches, gets the scores of
the others, and evaluates the whole loss, or the other parts without their way back. An error is shared before anything
is accumulated.

All tensors stay on the policy's device, and the host runs ahead of it until the end of the operation. Then all figures
are transferred at once, including the checks for non-finite values. The row at fault is searched for only if one fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.lanes import Key, Lanes
from gradwire_server.engine.model.layers.dropout import seeded
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.scoring.forward import Reading
from gradwire_server.engine.scoring.parts import Part
from gradwire_server.engine.scoring.planner import Budget, split_for_training
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector, shared_norms
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores, combined
from gradwire_server.engine.training.loss_call import LossOnBatch, LossOnPart, evaluated
from gradwire_server.engine.training.loss_report import LossEvaluation, reported_pass


class Training:
    """One run's part in a :func:`forward_backward`.

    Args:
        loss: The loss on the run's batch.
        accumulator: Receives the gradient; an error leaves it unchanged.
        budget: Memory limits.
        dropout_seed: Identifies the run and operation for dropout masks.
        agreement: This process's agreement with the others of the engine.

    Attributes:
        loss, accumulator, budget: The same.
        lanes: The lanes of the micro-batches.
        reading: The scores wanted of the whole batch.
        micros: The micro-batches that go through the model.
        parts: What the loss is evaluated on: each micro-batch if it streams, else the whole batch.
        dropout_seed: The same.
        counts_before: What had been accumulated before the gradient was: key -> divisor of its sum.
    """

    def __init__(
        self,
        loss: LossOnBatch,
        accumulator: GradientAccumulator,
        *,
        budget: Budget,
        dropout_seed: str = "",
        agreement: Agreement | None = None,
    ) -> None:
        self.loss, self.accumulator, self.budget, self.dropout_seed = loss, accumulator, budget, dropout_seed
        self.lanes = Lanes(budget.lanes, agreement)
        self.reading = Reading(loss.policy, loss.batch, loss.names, loss.temperature, loss.teacher, budget)
        self.micros = split_for_training(loss.policy, loss.batch, budget)
        whole = [Part(loss.batch, self.micros)]
        self.parts = [Part.of(loss.batch, micro) for micro in self.micros] if loss.streams else whole
        if loss.streams and self.lanes.count > 1:  # processes have different parts
            loss.rng = partial(seeded, f"{dropout_seed}/loss")
        self.counts_before: Mapping[Key, float] = {}


def forward_backward(trainings: Sequence[Training]) -> list[LossEvaluation | None]:
    """Compute losses and add their gradients to the accumulators.

    Args:
        trainings: One training, or several that satisfy :func:`can_join`, of policies that satisfy
            :func:`.shared_forward.can_go_together`.

    Returns:
        For each its evaluation, or None if it failed in company: nothing of it is accumulated, and repeating it alone
        gives its error.

    Raises:
        OperationError: Of a training alone: INVALID_BATCH, or NON_FINITE with the row at fault.
        Exception: Any error in the shared computation; nothing is accumulated then.
    """
    first, recomputed = trainings[0], False
    readings, losses = [each.reading for each in trainings], [each.loss for each in trainings]
    steps = list(zip(*(each.parts for each in trainings), strict=True))
    # Either the parts are spread over the processes, or the micro-batches of the one part there is.
    outer, inner = first.lanes.split(streams=first.loss.streams)
    own_scores: dict[int, Sequence[Mapping[str, Tensor]]] = {}
    on_parts: dict[int, Sequence[LossOnPart | None]] = {}
    with ExitStack() as stack:
        collectors = [
            stack.enter_context(GradientCollector(loss.policy.trainable_parameters(), first.lanes)) for loss in losses
        ]
        stack.enter_context(outer.together("parts"))
        for index, repeated in outer.steps(len(steps)):
            scores = DifferentiableScores(
                readings, steps[index], keep_single=True, dropout_seed=first.dropout_seed, lanes=inner
            )
            gradients: list[Mapping[Key, Mapping[str, Tensor]]] = [{}] * len(losses)
            with inner.together("loss"):
                if not repeated:
                    own_scores[index] = scores.own.get(0, ())
                    on_parts[index] = evaluated(losses, steps[index], scores.by_name, scores.routers, index)
                    for number, on_part in enumerate(on_parts[index]):
                        gradients[number] = on_part.gradients if on_part is not None else {}
            scores.backward(collectors, outer.in_all(gradients), lane=index % outer.count, repeated=repeated)
            recomputed |= scores.recomputed
    norms = shared_norms(collectors, first.loss.policy.device)
    # The loss on the parts of other processes follows from their scores.
    for index, theirs in enumerate(outer.gathered(own_scores, len(steps))):
        if index not in on_parts:
            on_parts[index] = evaluated(losses, steps[index], *combined(readings, steps[index], [theirs]), index)
    in_order = zip(*map(on_parts.__getitem__, range(len(steps))), strict=True)
    reports: list[LossEvaluation | None] = [None] * len(trainings)
    for number, (training, own, collector, norm) in enumerate(zip(trainings, in_order, collectors, norms, strict=True)):
        try:
            passed = reported_pass(training.loss, own, training.micros, collector, norm, recomputed=recomputed)
            if passed is not None:
                reports[number], counts = passed
                training.counts_before = training.accumulator.merge(collector.by_key, counts, norm=norm)
        except Exception as error:  # it is this training's alone
            reports[number] = None
            if len(trainings) == 1 or is_fatal(error):
                raise
    return reports


def can_join(training: Training) -> bool:
    """Whether a training is one micro-batch with scored tokens; batches with images are computed alone."""
    return len(training.micros) == 1 and training.loss.batch.images is None and len(training.reading.positions) > 0


def fits(trainings: Sequence[Training], most_tokens: int) -> bool:
    """Whether trainings that satisfy :func:`can_join` compute at most ``most_tokens`` together."""
    micros = [training.micros[0] for training in trainings]
    if trainings[0].loss.policy.packing(training=True) is not Packing.PADDED:
        return sum(micro.computed_tokens for micro in micros) <= most_tokens
    width = max(int(micro.batch.lengths.max()) for micro in micros)
    return sum(micro.batch.num_sequences for micro in micros) * width <= most_tokens
