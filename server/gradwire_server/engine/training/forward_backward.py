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

All tensors stay on the policy's device, and the host runs ahead of it until the end of the operation. Then all figures
are transferred at once, including the checks for non-finite values. The row at fault is searched for only if one fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.placement import total_norms
from gradwire_server.engine.scoring.forward import Reading
from gradwire_server.engine.scoring.parts import Part
from gradwire_server.engine.scoring.planner import Budget, split_for_training
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector, Key
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores
from gradwire_server.engine.training.loss_call import LossOnBatch
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported


class Training:
    """One run's part in a :func:`forward_backward`.

    Args:
        loss: The loss on the run's batch.
        accumulator: Receives the gradient; an error leaves it unchanged.
        budget: Memory limits.
        dropout_seed: Identifies the run and operation for dropout masks.

    Attributes:
        loss: The same.
        reading: The scores wanted of the whole batch.
        micros: The micro-batches that go through the model.
        parts: What the loss is evaluated on: each micro-batch if it streams, else the whole batch.
        dropout_seed: The same.
        rng: Makes the context in which the loss draws random numbers; by default it draws from the generators as they
            are.
    """

    def __init__(
        self, loss: LossOnBatch, accumulator: GradientAccumulator, *, budget: Budget, dropout_seed: str = ""
    ) -> None:
        self.loss, self.dropout_seed = loss, dropout_seed
        self.reading = Reading(loss.policy, loss.batch, loss.names, loss.temperature, loss.teacher, budget)
        self.micros = split_for_training(loss.policy, loss.batch, budget)
        whole = [Part(loss.batch, self.micros)]
        self.parts = [Part.of(loss.batch, micro) for micro in self.micros] if loss.streams else whole
        self.rng: Callable[[], AbstractContextManager[None]] = nullcontext
        self._accumulator = accumulator

    def end(self, collector: GradientCollector, norm: Tensor, *, recomputed: bool) -> LossEvaluation:
        """Report the loss, and accumulate the gradient of all parts.

        Args:
            collector: The gradient, whose norm is ``norm``.
            recomputed: Whether any micro-batch was computed twice.

        Raises:
            OperationError: NON_FINITE, with the row at fault where one is found.
        """
        loss, name = self.loss, self.loss.call.loss.name
        sums = LossSums(name)
        for part in loss.evaluated:
            sums.add(part.output)
        if loss.routers is not None:
            sums.add_metrics(loss.routers.metrics())
        wanted = {output: loss.output_scores[output] for output in loss.outputs}
        outputs = sums.settle([part.totals for part in loss.evaluated], norm, outputs=wanted)
        if not sums.finite:
            for part in loss.evaluated:
                part.check_finite()
        if not sums.finite and not collector.finite():
            raise OperationError(
                training_pb2.ERROR_CODE_NON_FINITE,
                f"the gradient of {name} with respect to the weights is not finite, though loss and scores "
                "are; nothing was accumulated. A lower learning rate, or float32 weights, may help",
            )
        activations = Counter(micro.activations.label for micro in self.micros)
        found = reported(loss.batch, outputs, len(self.micros), sums, recomputed=recomputed, activations=activations)
        self._accumulator.merge(collector.by_key, sums.counts, norm=norm)
        return found


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
    first, alone, recomputed = trainings[0], len(trainings) == 1, False
    failed: set[Training] = set()
    with ExitStack() as stack:
        collectors = [
            stack.enter_context(GradientCollector(training.loss.policy.trainable_parameters()))
            for training in trainings
        ]
        for parts in zip(*(training.parts for training in trainings), strict=True):
            readings = [
                replace(training.reading, batch=part.batch) for training, part in zip(trainings, parts, strict=True)
            ]
            scores = DifferentiableScores(readings, parts, keep_single=True, dropout_seed=first.dropout_seed)
            gradients: list[Mapping[Key, Mapping[str, Tensor]]] = []
            for training, part, own in zip(trainings, parts, scores.by_name, strict=True):
                try:
                    with training.rng():
                        gradients.append(training.loss.evaluate(part, own, scores.routers))
                except Exception as error:  # whatever a loss raises, the other runs go on
                    if alone or is_fatal(error):
                        raise
                    failed.add(training)
                    gradients.append({})
            scores.backward(collectors, gradients)
            recomputed |= scores.recomputed
    found: list[LossEvaluation | None] = []
    norms = total_norms([collector.gradients for collector in collectors])
    for training, collector, norm in zip(trainings, collectors, norms, strict=True):
        try:
            found.append(None if training in failed else training.end(collector, norm, recomputed=recomputed))
        except Exception as error:  # as above
            if alone or is_fatal(error):
                raise
            found.append(None)
    return found


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
