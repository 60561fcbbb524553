"""One call of a loss: the scores it needs, its value on part of a batch, and its gradient in those scores.

If a value is not finite, the part can find the row at fault, which waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_ids
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import DivergenceConfig, LossConfig, LossSpec, TemperatureConfig
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.lanes import Key
from gradwire_server.engine.model.layers.routers import PROBABILITIES, RouterSums
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.parts import Part
from gradwire_server.engine.scoring.score_types import (
    HEAD_OF_SCORE,
    SEQUENCE_SCORES,
    Teacher,
    check_candidates,
    check_scores,
)

Reference = Callable[[Batch, float], Tensor]
"""``(batch, temperature) -> [T]`` log-probabilities of the scored tokens under the loss's reference."""


@dataclass(frozen=True, eq=False)
class LossCall:
    """A loss with its arguments, and what it compares with.

    Attributes:
        loss: The loss.
        config: Its arguments.
        reference: Computes reference log-probabilities; required if the loss needs ``ref_logprobs``.
        teacher: The same reference's policy; required if the loss needs ``divergence``.
    """

    loss: LossSpec
    config: LossConfig
    reference: Reference | None = None
    teacher: Policy | None = None

    @property
    def temperature(self) -> float:
        """Divisor of the logits before the loss's log-probabilities: its argument ``temperature``, or 1."""
        return self.config.temperature if isinstance(self.config, TemperatureConfig) else 1.0

    def needed_scores(self, policy: Policy, batch: Batch) -> frozenset[str]:
        """Scores that the loss requires, and its optional scores that the run can compute with its head.

        Raises:
            OperationError: INVALID_BATCH.
        """
        kind = policy.head.kind if policy.head else ""
        optional = frozenset(name for name in self.loss.optional_scores if HEAD_OF_SCORE.get(name, kind) == kind)
        try:
            return optional | self.loss.scores(self.config, frozenset(batch.fields))
        except BatchError as error:
            raise OperationError.from_batch_error(error) from error

    def needs_added_head(self, policy: Policy, batch: Batch) -> bool:
        """Whether a run is to be given a value head for this batch.

        So is a run without any head for a loss that can do without a critic, but not with this batch: ``enhanced_ppo``
        on a batch with neither ``values`` nor ``advantages``.
        """
        return policy.head is None and "values" in self.loss.optional_scores & self.needed_scores(policy, batch)

    def on(self, policy: Policy, batch: Batch, outputs: Collection[str] = ()) -> LossOnBatch:
        """Check the call and compute reference log-probabilities.

        Args:
            outputs: Names of further scores to compute, and :data:`ADVANTAGES`.

        Raises:
            OperationError: UNSUPPORTED, INVALID_ARGUMENT, INVALID_BATCH.
        """
        needed = self.needed_scores(policy, batch)
        own, teacher = needed - {"ref_logprobs"}, self._teacher(needed)
        further = set(outputs) - {ADVANTAGES}
        check_scores(policy, further, teacher)
        check_scores(policy, own, teacher, field="loss_fn")
        check_candidates(batch, own | further)
        ref_logprobs = self._ref_logprobs(policy, batch) if "ref_logprobs" in needed else None
        return LossOnBatch(
            call=self,
            policy=policy,
            batch=batch,
            own_scores=own,
            outputs=tuple(outputs),
            names=own | further,
            streams=self.loss.streams(self.config, frozenset(batch.fields)) and not policy.router_aux_loss_coef,
            temperature=self.temperature,
            teacher=teacher,
            ref_logprobs=ref_logprobs,
        )

    def _ref_logprobs(self, policy: Policy, batch: Batch) -> Tensor:
        """``[T]`` log-probabilities under the reference that the arguments name, on the policy's device."""
        if self.reference is None or getattr(self.config, "reference_model", None) is None:
            raise self._no_reference()
        logprobs = self.reference(batch, self.temperature).detach()
        return logprobs.to(policy.device, torch.float32, non_blocking=True)

    def _teacher(self, needed: Collection[str]) -> Teacher | None:
        """The policy and divergence to compare with if the loss needs ``divergence``; else None."""
        if "divergence" not in needed:
            return None
        if not isinstance(self.config, DivergenceConfig):
            raise TypeError(
                f"{self.loss.name} needs divergence: its config has to be a DivergenceConfig, which says which one"
            )
        if self.teacher is None or self.config.reference_model is None:
            raise self._no_reference()
        return Teacher(self.teacher, self.config.beta)

    def _no_reference(self) -> OperationError:
        return OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f'{self.loss.name} compares with a reference model and none is named: give reference_model, "base" say',
            field="reference_model",
            rule="required",
        )


ADVANTAGES = "advantages"
"""An output that is no score of the policy: the loss's own, where it has them."""


@dataclass(eq=False, kw_only=True)
class LossOnBatch:
    """A checked call of a loss on a batch, which is evaluated part by part; made by :meth:`LossCall.on`.

    Attributes:
        call: The loss with its arguments.
        policy: The policy to train.
        batch: The whole batch.
        own_scores: Names of the loss's scores that are computed with the policy.
        outputs: Names of further scores to compute.
        names: All of these names.
        streams: Whether the loss of the batch is the sum of those of its micro-batches.
        temperature: Divides the logits.
        teacher: The policy to compare with, or None.
        ref_logprobs: ``[T]`` reference log-probabilities, on the policy's device; None if the loss needs none.
        rng: Makes the context in which the loss draws random numbers for a part with this number; by default it draws
            from the generators as they are.
    """

    call: LossCall
    policy: Policy
    batch: Batch
    own_scores: frozenset[str]
    outputs: tuple[str, ...]
    names: frozenset[str]
    streams: bool
    temperature: float
    teacher: Teacher | None
    ref_logprobs: Tensor | None
    rng: Callable[[int], AbstractContextManager[object]] = nullcontext

    def scores(self, part: Part, computed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loss's scores of a part, of those that were computed with the policy."""
        scores = {name: computed[name] for name in self.own_scores}
        if self.ref_logprobs is not None:
            index, whole = part.tokens, self.ref_logprobs
            scores["ref_logprobs"] = whole if index is None else whole[beside(index, whole)]
        return scores

    def value(self, computed: Mapping[str, Tensor]) -> LossOutput:
        """Evaluate the loss on the whole batch, without gradients.

        Raises:
            OperationError: INVALID_BATCH.
        """
        scores = self.scores(Part(self.batch, []), computed)
        with torch.no_grad():
            return _call(self.call, self.batch.to(self.policy.device), scores)

    def evaluate(self, part: Part, computed: Mapping[str, Tensor], routers: RouterSums | None) -> LossOnPart:
        """Evaluate the loss on a part, and compute the gradient of each of its units.

        With the load-balancing loss, the first unit has its gradient too, as that of :data:`.routers.PROBABILITIES`:
        times its coefficient, and times the unit's divisor.

        Args:
            computed: Scores of the part, on the policy's device.
            routers: What the routers of a mixture of experts decided on it; None for another model.

        Raises:
            OperationError: INVALID_BATCH.
        """
        call, scores = self.call, self.scores(part, computed)
        leaves = {
            name: values.requires_grad_() if values.is_floating_point() and name != "ref_logprobs" else values
            for name, values in ((name, values.detach()) for name, values in scores.items())
        }
        output = _call(call, part.batch.to(self.policy.device), leaves, part.examples)
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        units: dict[str, list[Tensor]] = {}
        for term in output.terms.values():
            if term.sum.requires_grad:
                units.setdefault(term.unit, []).append(term.sum)
        by_key: dict[Key, dict[str, Tensor]] = {}
        for unit, terms in units.items():
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            of_leaves = torch.autograd.grad(
                total, list(trained.values()), allow_unused=True, retain_graph=len(units) > 1
            )
            by_key[call.loss.name, unit] = {
                name: gradient for name, gradient in zip(trained, of_leaves, strict=True) if gradient is not None
            }
        floating = (*scores.values(), *(one for by_name in by_key.values() for one in by_name.values()))
        totals = [values.sum() for values in floating if values.is_floating_point()]
        if routers is not None and self.policy.router_aux_loss_coef and by_key:
            unit = next(iter(units))
            count = next(term.count for term in output.terms.values() if term.unit == unit)
            balance = routers.balance_gradient() * (self.policy.router_aux_loss_coef * count)
            by_key[call.loss.name, unit][PROBABILITIES] = balance
        wanted = {name: output.advantages if name == ADVANTAGES else computed[name] for name in self.outputs}
        outputs = {name: values.detach() for name, values in wanted.items() if values is not None}
        return LossOnPart(call, part, scores, output, outputs, routers, by_key, totals)


def evaluated(
    losses: Sequence[LossOnBatch],
    parts: Sequence[Part],
    by_name: Sequence[Mapping[str, Tensor]],
    routers: RouterSums | None,
    number: int,
) -> list[LossOnPart | None]:
    """Evaluate each loss on its part; in company None for one that raises.

    Args:
        by_name: Scores of each part.
        routers: What the routers of a mixture of experts decided on a part alone; None for another model.
        number: That of the parts.
    """
    on_parts: list[LossOnPart | None] = []
    for loss, part, scores in zip(losses, parts, by_name, strict=True):
        try:
            with loss.rng(number):
                on_parts.append(loss.evaluate(part, scores, routers))
        except Exception as error:  # whatever a loss raises, the other runs go on
            if len(losses) == 1 or is_fatal(error):
                raise
            on_parts.append(None)
    return on_parts


def _call(call: LossCall, batch: Batch, scores: Mapping[str, Tensor], rows: Tensor | None = None) -> LossOutput:
    """Call the loss on a batch with its scores.

    Args:
        rows: ``[b]`` rows in the caller's batch of these examples; None if they are the same.

    Raises:
        OperationError: INVALID_BATCH.
    """
    try:
        return call.loss.function(batch, Scores(scores), call.config)
    except BatchError as error:
        if rows is not None and error.row is not None:
            error.row = int(rows[error.row])
        raise OperationError.from_batch_error(error) from error


@dataclass(frozen=True, eq=False)
class LossOnPart:
    """A loss's value on a part of the batch, and the gradient of each unit's sum in each score.

    Attributes:
        scores: The loss's scores.
        outputs: The scores to return.
        routers: What the routers of a mixture of experts decided on the part; None for another model.
        totals: 0-d sums of all scores and gradients: not finite if any entry is not, or if a sum overflows.
    """

    call: LossCall
    part: Part
    scores: Mapping[str, Tensor]
    output: LossOutput
    outputs: Mapping[str, Tensor]
    routers: RouterSums | None
    gradients: Mapping[Key, Mapping[str, Tensor]]
    totals: list[Tensor]

    def check_finite(self) -> None:
        """Search for the row with a non-finite value.

        Raises:
            OperationError: NON_FINITE, with the row, if scores, the loss or a gradient are not finite.
        """
        part, rows = self.part, self.part.rows
        check_finite(part.batch, self.scores, rows, "the model gave non-finite")
        if not all(math.isfinite(term.sum.item()) for term in self.output.terms.values()):
            raise _non_finite_loss(self.call, part, self.scores)
        for by_name in self.gradients.values():
            gradients = {name: values for name, values in by_name.items() if name in self.scores}
            check_finite(part.batch, gradients, rows, f"{self.call.loss.name} has a non-finite gradient for")


def check_finite(batch: Batch, values: Mapping[str, Tensor], rows: Tensor, what: str) -> None:
    """Check that all entries are finite.

    Args:
        values: Score name -> entries shaped like that score.
        rows: ``[b]`` rows in the caller's batch of this batch's examples.
        what: Beginning of the error message, which the score's name follows.

    Raises:
        OperationError: NON_FINITE, with the row of the first non-finite entry.
    """
    for name, entries in values.items():
        if not entries.is_floating_point() or bool(entries.isfinite().all()):
            continue
        first = int((~entries.isfinite()).nonzero()[0, 0])
        sequence = first if name in SEQUENCE_SCORES else int(segment_ids(batch.row_lengths)[first])
        row = int(rows[segment_ids(batch.group_sizes)[sequence]])
        raise OperationError(
            training_pb2.ERROR_CODE_NON_FINITE,
            f"{what} {name} in row {row}; nothing was accumulated and the weights are untouched",
            row=row,
            rule="finite",
        )


def _non_finite_loss(call: LossCall, part: Part, scores: Mapping[str, Tensor]) -> OperationError:
    """Make an error that names the first row whose own loss is not finite, or no row if only the total is not."""
    row = None
    scores = {name: values.cpu() for name, values in scores.items()}
    sequences = segment_ids(part.batch.group_sizes)
    for example in range(part.batch.num_examples):
        of_sequence = sequences == example
        of_token = of_sequence.repeat_interleave(part.batch.row_lengths)
        own = {name: values[of_sequence if name in SEQUENCE_SCORES else of_token] for name, values in scores.items()}
        with torch.no_grad():
            output = _call(call, part.batch.select(torch.tensor([example])), own)
        if not all(math.isfinite(term.sum.item()) for term in output.terms.values()):
            row = int(part.rows[example])
            break
    where = "" if row is None else f" in row {row}"
    return OperationError(
        training_pb2.ERROR_CODE_NON_FINITE,
        f"the loss {call.loss.name} is not finite{where}; nothing was accumulated and the weights are untouched",
        row=row,
        rule="finite",
    )
