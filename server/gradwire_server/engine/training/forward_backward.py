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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.lanes import Lanes
from gradwire_server.engine.model.layers.dropout import seed_generators
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.placement import total_norms
from gradwire_server.engine.scoring.forward import Reading
from gradwire_server.engine.scoring.parts import Part
from gradwire_server.engine.scoring.planner import Budget, split_for_training
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores, combined
from gradwire_server.engine.training.loss_call import LossOnBatch, LossOnPart
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported


class Training:
    """One run's part in a :func:`forward_backward`.

    Args:
        loss: The loss on the run's batch.
        accumulator: Receives the gradient; an error leaves it unchanged.
        budget: Memory limits.
        dropout_seed: Identifies the run and operation for dropout masks.
        agreement: This process's agreement with the others of the engine.

    Attributes:
        loss: The same.
        lanes: The lanes of the micro-batches.
        reading: The scores wanted of the whole batch.
        micros: The micro-batches that go through the model.
        parts: What the loss is evaluated on: each micro-batch if it streams, else the whole batch.
        dropout_seed: The same.
        rng: Makes the context in which the loss draws random numbers; by default it draws from the generators as they
            are.
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
        self.loss, self.dropout_seed = loss, dropout_seed
        self.lanes = Lanes(budget.lanes, agreement)
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
    # Either the parts are spread over the processes, or the micro-batches of the one part there is.
    outer, inner = (first.lanes, Lanes()) if first.loss.streams else (Lanes(), first.lanes)
    scored: dict[int, DifferentiableScores] = {}
    losses: dict[int, list[LossOnPart | None]] = {}
    with ExitStack() as stack:
        collectors = [
            stack.enter_context(GradientCollector(training.loss.policy.trainable_parameters(), first.lanes))
            for training in trainings
        ]
        with outer.together("parts"):
            for index in outer.steps(len(first.parts)):
                readings, parts = _on_part(trainings, index)
                scores = DifferentiableScores(
                    readings, parts, keep_single=True, dropout_seed=first.dropout_seed, lanes=inner
                )
                with inner.together("loss"):
                    found = losses[index] = _evaluated(trainings, index, scores.by_name, failed)
                gradients = [
                    {} if each is None else training.loss.gradients(each, scores.routers)
                    for training, each in zip(trainings, found, strict=True)
                ]
                scores.backward(collectors, gradients, lane=index % outer.count)
                recomputed |= scores.recomputed
                scored[index] = scores
    _take(trainings, outer, scored, losses)
    for collector in collectors:
        collector.share(first.loss.policy.device)
    ends: list[LossEvaluation | None] = []
    norms = total_norms([collector.gradients for collector in collectors])
    for training, collector, norm in zip(trainings, collectors, norms, strict=True):
        try:
            ends.append(None if training in failed else training.end(collector, norm, recomputed=recomputed))
        except Exception as error:  # as above
            if alone or is_fatal(error):
                raise
            ends.append(None)
    return ends


def _on_part(trainings: Sequence[Training], index: int) -> tuple[list[Reading], list[Part]]:
    """The scores wanted of each training's part, and these parts."""
    parts = [training.parts[index] for training in trainings]
    return [replace(each.reading, batch=part.batch) for each, part in zip(trainings, parts, strict=True)], parts


def _evaluated(
    trainings: Sequence[Training], index: int, by_name: Sequence[Mapping[str, Tensor]], failed: set[Training]
) -> list[LossOnPart | None]:
    """Each training's loss on its part; None, and ``failed``, where that raises in company."""
    found: list[LossOnPart | None] = []
    for training, own in zip(trainings, by_name, strict=True):
        try:
            with training.rng(), _numbers_of_part(training, index):
                found.append(training.loss.evaluate(training.parts[index], own))
        except Exception as error:  # whatever a loss raises, the other runs go on
            if len(trainings) == 1 or is_fatal(error):
                raise
            failed.add(training)
            found.append(None)
    return found


@contextmanager
def _numbers_of_part(training: Training, index: int) -> Iterator[None]:
    """Let a loss that streams draw numbers that depend on its part alone, where processes have different parts."""
    if training.lanes.count == 1 or not training.loss.streams:
        yield
        return
    with preserved_rng():
        seed_generators(f"{training.dropout_seed}/loss", index)
        yield


def _take(
    trainings: Sequence[Training],
    lanes: Lanes,
    scored: Mapping[int, DifferentiableScores],
    losses: Mapping[int, Sequence[LossOnPart | None]],
) -> None:
    """Take note of all parts in their order, those of other processes included, which are evaluated from their scores.

    Args:
        lanes: Those of the parts.
        scored, losses: The scores and the losses of this process's parts, by number.
    """
    steps = lanes.gathered({index: each.own.get(0, ()) for index, each in scored.items()}, len(trainings[0].parts))
    for index, step in enumerate(steps):
        if index in scored:
            by_name, routers, found = scored[index].by_name, scored[index].routers, losses[index]
        else:
            by_name, routers = combined(*_on_part(trainings, index), [step])
            found = _evaluated(trainings, index, by_name, set())
        for training, computed, own in zip(trainings, by_name, found, strict=True):
            if own is not None:
                training.loss.take(own, computed, routers)


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
