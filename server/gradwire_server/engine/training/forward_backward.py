"""``forward_backward``: compute a loss and add its gradient to the run's accumulation.

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

from collections.abc import Collection, Mapping

from gradwire_losses.batch import Batch, beside
from gradwire_losses.registry import LossConfig, LossSpec
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.routers import RouterSums
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.scoring.score_types import check_candidates, check_scores
from gradwire_server.engine.training.accumulation import GradientAccumulator, GradientCollector, Key
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores, counted, training_micros
from gradwire_server.engine.training.loss_call import (
    LossOnPart,
    LossView,
    Reference,
    loss_on_part,
    loss_teacher,
    loss_temperature,
    needed_scores,
    part_of,
    reference_logprobs,
)
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported


class Training:
    """The state of one ``forward_backward``, from checking the call to its result.

    The constructor checks the call and computes reference log-probabilities. Then call :meth:`evaluate` for each of
    :meth:`parts`, and :meth:`end`.

    Args:
        accumulator: Receives the gradient; an error leaves it unchanged.

    Attributes:
        policy: The policy to train.
        batch: The whole batch.
        loss: The loss.
        names: Names of the scores to compute with the policy.
        temperature: Divides the logits.
        teacher: The policy to compare with, or None.
        budget: Memory limits.
        dropout_seed: Identifies the run and operation for dropout masks.
        micros: The micro-batches that go through the model.

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
        self._routers: RouterSums | None = None

    def parts(self) -> list[LossView]:
        """Parts of the batch that the loss is evaluated on: each micro-batch if it streams, else the whole batch."""
        streams = self.loss.streams(self._config, frozenset(self.batch.fields))
        if streams and not self.policy.router_aux_loss_coef:
            return [part_of(self.batch, micro) for micro in self.micros]
        return [LossView(self.batch, self.micros)]

    def evaluate(self, part: LossView, scores: Mapping[str, Tensor]) -> dict[Key, dict[str, Tensor]]:
        """Evaluate the loss on a part and return the gradient of each key in each score.

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

    def balance(self, routers: RouterSums | None) -> Tensor | None:
        """Take note of what routers decided on the part evaluated last, and return the load-balancing loss's gradient.

        Returns:
            ``[E]`` its gradient in the routers' summed probabilities, with its coefficient and times the divisor of the
            loss's first unit; None without such a loss.
        """
        if routers is None:
            return None
        self._routers = routers if self._routers is None else self._routers + routers
        evaluated = self._evaluated[-1]
        if not self.policy.router_aux_loss_coef or not evaluated.gradients:
            return None
        _, unit = next(iter(evaluated.gradients))
        count = next(term.count for term in evaluated.output.terms.values() if term.unit == unit)
        return routers.balance_gradient() * (self.policy.router_aux_loss_coef * count)

    def end(
        self,
        collector: GradientCollector,
        num_microbatches: int,
        recomputed: bool = False,
        *,
        norm: Tensor | None = None,
    ) -> LossEvaluation:
        """Accumulate the gradient of all parts and report the loss.

        Args:
            norm: The collector's, where it is known already.

        Raises:
            OperationError: NON_FINITE, with the row at fault where one is found.
        """
        sums = self._sums
        if self._routers is not None:
            sums.add_metrics(self._routers.metrics())
        wanted = {name: self._output_scores[name] for name in self._outputs}
        norm = collector.norm() if norm is None else norm
        outputs = sums.settle([part.totals() for part in self._evaluated], norm, outputs=wanted)
        if not sums.finite:
            for part in self._evaluated:
                part.check_finite()
        if not sums.finite and not collector.finite():
            raise OperationError(
                training_pb2.ERROR_CODE_NON_FINITE,
                f"the gradient of {self.loss.name} with respect to the weights is not finite, though loss and scores "
                "are; nothing was accumulated. A lower learning rate, or float32 weights, may help",
            )
        self._accumulator.merge(collector.by_key, sums.counts, norm=norm)
        return reported(
            self.batch, outputs, num_microbatches, sums, recomputed=recomputed, activations=counted(self.micros)
        )


def forward_backward(training: Training) -> LossEvaluation:
    """Compute a loss and add its gradient to the accumulator, which an error leaves unchanged.

    Raises:
        OperationError: INVALID_BATCH, or NON_FINITE with the row at fault.
    """
    recomputed, num_microbatches = False, 0
    with GradientCollector(training.policy.trainable_parameters()) as collector:
        for part in training.parts():
            kept = DifferentiableScores(
                training.policy,
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
            gradients = training.evaluate(part, kept.by_name)
            kept.backward(collector, gradients, training.balance(kept.routers))
            recomputed |= kept.recomputed
            num_microbatches += kept.num_microbatches
    return training.end(collector, num_microbatches, recomputed)
