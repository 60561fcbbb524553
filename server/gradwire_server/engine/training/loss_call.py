"""One call of a loss: the scores it needs, its value on part of a batch, and its gradient in those scores.

If a value is not finite, the part can find the row at fault, which waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_ids
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import DivergenceConfig, LossConfig, LossSpec, TemperatureConfig
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import MicroBatch
from gradwire_server.engine.scoring.score_types import HEAD_OF_SCORE, SEQUENCE_SCORES, Teacher, entries_of
from gradwire_server.engine.training.accumulation import Key

Reference = Callable[[Batch, float], Tensor]
"""``(batch, temperature) -> [T]`` log-probabilities of the scored tokens under the loss's reference."""


@dataclass(frozen=True)
class LossView:
    """Some or all examples of a batch.

    Attributes:
        batch: The examples as a batch.
        micros: Micro-batches that go through the model, with indices into ``batch``.
        whole: The part as a micro-batch with indices into the whole batch; None if it is the whole batch.
    """

    batch: Batch
    micros: list[MicroBatch]
    whole: MicroBatch | None = None

    @property
    def examples(self) -> Tensor | None:
        """``[b]`` rows in the whole batch; None if this is the whole batch."""
        return None if self.whole is None else self.whole.examples

    @property
    def tokens(self) -> Tensor | None:
        """``[t]`` scored tokens in the whole batch; None if this is the whole batch."""
        return None if self.whole is None else self.whole.tokens

    @property
    def rows(self) -> Tensor:
        """``[b]`` rows in the whole batch."""
        return torch.arange(self.batch.num_examples) if self.whole is None else self.whole.examples

    def place(self, whole: Batch, name: str, values: Tensor, into: dict[str, Tensor]) -> None:
        """Write this part's scores to their places among those of the whole batch."""
        if self.whole is None:
            into[name] = values
        else:
            if name not in into:
                count = whole.num_sequences if name in SEQUENCE_SCORES else whole.num_scored
                into[name] = values.new_zeros(count, *values.shape[1:])
            into[name][beside(entries_of(self.whole, name), values)] = values


def part_of(batch: Batch, micro: MicroBatch) -> LossView:
    """Make the view of one micro-batch of a batch, which may be the whole batch."""
    if micro.batch is batch:
        return LossView(batch, [micro])
    examples, sequences, tokens = (torch.arange(len(each)) for each in (micro.examples, micro.sequences, micro.tokens))
    own = replace(micro, examples=examples, sequences=sequences, tokens=tokens)
    return LossView(micro.batch, [own], micro)


def needed_scores(loss: LossSpec, config: LossConfig, batch: Batch, policy: Policy) -> frozenset[str]:
    """Scores that the loss requires, and its optional scores that the run can compute with its head."""
    kind = policy.head.kind if policy.head else ""
    optional = frozenset(name for name in loss.optional_scores if HEAD_OF_SCORE.get(name, kind) == kind)
    try:
        return optional | loss.scores(config, frozenset(batch.fields))
    except BatchError as error:
        raise OperationError.from_batch_error(error) from error


def needs_added_head(loss: LossSpec, config: LossConfig, batch: Batch, policy: Policy) -> bool:
    """Whether a run is to be given a value head for this batch.

    So is a run without any head for a loss that can do without a critic, but not with this batch: ``enhanced_ppo`` on a
    batch with neither ``values`` nor ``advantages``.
    """
    return policy.head is None and "values" in loss.optional_scores & needed_scores(loss, config, batch, policy)


def loss_temperature(config: LossConfig) -> float:
    """Divisor of the logits before a loss's log-probabilities: its argument ``temperature``, or 1."""
    return config.temperature if isinstance(config, TemperatureConfig) else 1.0


def reference_logprobs(
    loss: LossSpec, config: LossConfig, reference: Reference | None, batch: Batch, policy: Policy
) -> Tensor:
    """Log-probabilities ``[T]`` under the reference that the loss's arguments name, on the policy's device.

    Raises:
        OperationError: INVALID_ARGUMENT if they name none.
    """
    if reference is None or getattr(config, "reference_model", None) is None:
        raise _no_reference(loss)
    logprobs = reference(batch, loss_temperature(config)).detach()
    return logprobs.to(policy.device, torch.float32, non_blocking=True)


def loss_teacher(loss: LossSpec, config: LossConfig, teacher: Policy | None, needed: Collection[str]) -> Teacher | None:
    """The policy and divergence to compare with if the loss needs ``divergence``; else None.

    Raises:
        OperationError: INVALID_ARGUMENT if the loss's arguments name no reference.
    """
    if "divergence" not in needed:
        return None
    if not isinstance(config, DivergenceConfig):
        raise TypeError(f"{loss.name} needs divergence: its config has to be a DivergenceConfig, which says which one")
    if teacher is None or config.reference_model is None:
        raise _no_reference(loss)
    return Teacher(teacher, config.beta)


def _no_reference(loss: LossSpec) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_ARGUMENT,
        f'{loss.name} compares with a reference model and none is named: give reference_model, "base" say',
        field="reference_model",
        rule="required",
    )


def call_loss(
    loss: LossSpec, batch: Batch, scores: Mapping[str, Tensor], config: LossConfig, rows: Tensor | None = None
) -> LossOutput:
    """Call the loss on a batch with its scores.

    Args:
        rows: ``[b]`` rows in the caller's batch of these examples; None if they are the same.

    Raises:
        OperationError: INVALID_BATCH.
    """
    try:
        return loss.function(batch, Scores(scores), config)
    except BatchError as error:
        if rows is not None and error.row is not None:
            error.row = int(rows[error.row])
        raise OperationError.from_batch_error(error) from error


@dataclass(frozen=True)
class LossOnPart:
    """A loss's value on a part of the batch, and the gradient of each unit's sum in each score."""

    loss: LossSpec
    config: LossConfig
    part: LossView
    scores: Mapping[str, Tensor]
    output: LossOutput
    gradients: dict[Key, dict[str, Tensor]]

    def totals(self) -> list[Tensor]:
        """0-d sums of all scores and gradients: not finite if any entry is not, or if a sum overflows."""
        found = [*self.scores.values(), *(one for by_name in self.gradients.values() for one in by_name.values())]
        return [values.sum() for values in found if values.is_floating_point()]

    def check_finite(self) -> None:
        """Search for the row with a non-finite value.

        Raises:
            OperationError: NON_FINITE, with the row, if scores, the loss or a gradient are not finite.
        """
        part, rows = self.part, self.part.rows
        check_finite(part.batch, self.scores, rows, "the model gave non-finite")
        if not all(math.isfinite(term.sum.item()) for term in self.output.terms.values()):
            raise _non_finite_loss(self.loss, self.config, part, self.scores)
        for gradients in self.gradients.values():
            check_finite(part.batch, gradients, rows, f"{self.loss.name} has a non-finite gradient for")


def loss_on_part(
    loss: LossSpec, config: LossConfig, part: LossView, scores: Mapping[str, Tensor], device: torch.device
) -> LossOnPart:
    """Call the loss on a part and compute the gradient of each of its units.

    Args:
        scores: Scores of the part, on ``device``; "ref_logprobs" gets no gradient.

    Raises:
        OperationError: INVALID_BATCH.
    """
    leaves = {
        name: values.requires_grad_() if values.is_floating_point() and name != "ref_logprobs" else values
        for name, values in ((name, values.detach()) for name, values in scores.items())
    }
    output = call_loss(loss, part.batch.to(device), leaves, config, part.examples)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    units: dict[str, list[Tensor]] = {}
    for term in output.terms.values():
        if term.sum.requires_grad:
            units.setdefault(term.unit, []).append(term.sum)
    by_key: dict[Key, dict[str, Tensor]] = {}
    for unit, terms in units.items():
        total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
        found = torch.autograd.grad(total, list(trained.values()), allow_unused=True, retain_graph=len(units) > 1)
        by_key[loss.name, unit] = {
            name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None
        }
    return LossOnPart(loss, config, part, scores, output, by_key)


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


def _non_finite_loss(
    loss: LossSpec, config: LossConfig, part: LossView, scores: Mapping[str, Tensor]
) -> OperationError:
    """Make an error that names the first row whose own loss is not finite, or no row if only the total is not."""
    row = None
    scores = {name: values.cpu() for name, values in scores.items()}
    sequences = segment_ids(part.batch.group_sizes)
    for example in range(part.batch.num_examples):
        of_sequence = sequences == example
        of_token = of_sequence.repeat_interleave(part.batch.row_lengths)
        own = {name: values[of_sequence if name in SEQUENCE_SCORES else of_token] for name, values in scores.items()}
        with torch.no_grad():
            output = call_loss(loss, part.batch.select(torch.tensor([example])), own, config)
        if not all(math.isfinite(term.sum.item()) for term in output.terms.values()):
            row = int(part.rows[example])
            break
    where = "" if row is None else f" in row {row}"
    return OperationError(
        training_pb2.ERROR_CODE_NON_FINITE,
        f"the loss {loss.name} is not finite{where}; nothing was accumulated and the weights are untouched",
        row=row,
        rule="finite",
    )
