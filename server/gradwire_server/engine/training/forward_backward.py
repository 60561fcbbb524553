"""``forward_backward``: a loss over a policy, and its gradient into what the run accumulates.

The loss always gives what it would give if it saw the whole batch at once. One that streams is evaluated micro-batch
by micro-batch, each one's graph being used and freed at once. Any other is evaluated once, on the scores of the
whole batch, and its gradient goes back through :class:`.kept_scores.DifferentiableScores`.

Everything stays on the policy's device, and the host runs ahead of it, until the operation's end: then all figures
come over at once, those among them that tell whether anything was not finite. Who is to blame is asked only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from gradwire_losses.batch import Batch, beside
from gradwire_losses.registry import LossConfig, LossSpec
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget, divided
from gradwire_server.engine.scoring.score_types import check_candidates, check_scores
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector, Key
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores, training_micros
from gradwire_server.engine.training.loss_call import (
    LossOnPart,
    Reference,
    loss_on_part,
    loss_teacher,
    loss_temperature,
    needed_scores,
    reference_logprobs,
)
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported
from gradwire_server.engine.training.loss_view import LossView, part_of


class Training:
    """A ``forward_backward``: checked, and with what its references say; then evaluated in parts, and ended.

    Args:
        accumulator: takes the gradient; an error leaves it as it was.

    Attributes:
        policy, batch, loss: as given.
        names: of the scores that the policy is to give.
        temperature, teacher, budget, dropout_seed: with which.
        micros: how the batch goes through the model.

    Raises:
        OperationError: UNSUPPORTED, INVALID_ARGUMENT, INVALID_BATCH.
    """

    def __init__(
        self,
        policy: Policy,
        batch: Batch,
        loss: LossSpec,
        config: LossConfig,
        accumulator: GradientAccumulator,
        *,
        reference: Reference | None = None,
        teacher: Policy | None = None,
        outputs: Collection[str] = (),
        budget: Budget,
        dropout_seed: str = "",
    ) -> None:
        needed = needed_scores(loss, config, batch, policy)
        self.policy, self.batch, self.loss, self.budget = policy, batch, loss, budget
        self.names = (needed - {"ref_logprobs"}) | set(outputs)
        self.teacher = loss_teacher(loss, config, teacher, needed)
        check_scores(policy, outputs, self.teacher)
        check_scores(policy, self.names, self.teacher, field="loss_fn")
        check_candidates(batch, self.names)
        self.temperature = loss_temperature(config)
        self.micros, self.dropout_seed = training_micros(policy, batch, budget), dropout_seed
        self._config, self._accumulator, self._outputs = config, accumulator, outputs
        self._used = needed - {"ref_logprobs"}
        self._ref_logprobs = None
        if "ref_logprobs" in needed:
            self._ref_logprobs = reference_logprobs(loss, config, reference, batch, policy)
        self._sums = LossSums(loss.name)
        self._evaluated: list[LossOnPart] = []
        self._output_scores: dict[str, Tensor] = {}

    def parts(self) -> list[LossView]:
        """What the loss is shown at a time."""
        if self.loss.streams(self._config, frozenset(self.batch.fields)):
            return [part_of(self.batch, micro) for micro in self.micros]
        return [LossView(self.batch, self.micros)]

    def evaluate(self, part: LossView, scores: Mapping[str, Tensor]) -> dict[Key, dict[str, Tensor]]:
        """The loss of a part, and its gradient for each of the scores.

        Raises:
            OperationError: INVALID_BATCH.
        """
        used = {name: scores[name] for name in self._used}
        if self._ref_logprobs is not None:
            index, whole = part.tokens, self._ref_logprobs
            used["ref_logprobs"] = whole if index is None else whole[beside(index, whole)]
        found = loss_on_part(self.loss, self._config, part, used, self.policy.device)
        self._evaluated.append(found)
        self._sums.add(found.output)
        for name in self._outputs:
            part.place(self.batch, name, scores[name], self._output_scores)
        return found.gradients

    def end(self, collector: GradientCollector, num_microbatches: int, recomputed: bool = False) -> LossEvaluation:
        """Accumulates the gradient of all parts.

        Raises:
            OperationError: NON_FINITE, with the row to blame.
        """
        sums = self._sums
        sums.settle([part.totals() for part in self._evaluated], collector.norm())
        if not sums.finite:
            for part in self._evaluated:
                part.check_finite()
        if not sums.finite and not collector.finite():
            raise OperationError(
                training_pb2.ERROR_CODE_NON_FINITE,
                f"the gradient of {self.loss.name} with respect to the weights is not finite, though loss and scores "
                "are; nothing was accumulated. A lower learning rate, or float32 weights, may help",
            )
        self._accumulator.merge(collector.by_key, sums.counts)
        found = reported(self.batch, self._output_scores, self._outputs, num_microbatches, sums)
        return replace(found, recomputed=recomputed, out_of_memory=num_microbatches > len(self.micros))


def forward_backward(training: Training) -> LossEvaluation:
    """A loss, and its gradient into the accumulator, which an error leaves as it was.

    Raises:
        OperationError: INVALID_BATCH, or NON_FINITE with the row to blame.
    """
    policy, packing = training.policy, training.policy.packing(training=True)
    waiting = deque(training.parts())
    recomputed, num_microbatches = False, 0
    with GradientCollector(policy.trainable_parameters()) as collector:
        while waiting:
            part = waiting.popleft()
            kept = DifferentiableScores(
                policy,
                part.batch,
                training.names,
                temperature=training.temperature,
                teacher=training.teacher,
                budget=training.budget,
                micros=part.micros,
                keep_single=True,
                dropout_seed=training.dropout_seed,
                rows=part.examples,
            )
            kept.backward(collector, training.evaluate(part, kept.by_name))
            recomputed |= kept.recomputed
            num_microbatches += kept.num_microbatches
            if waiting and kept.num_microbatches > 1:  # memory ran out, and would again
                left = [
                    micro
                    for each in waiting
                    for micro in divided(each.whole or each.micros[0], kept.largest_microbatch, packing)
                ]
                waiting = deque(part_of(training.batch, micro) for micro in left)
    return training.end(collector, num_microbatches, recomputed)
