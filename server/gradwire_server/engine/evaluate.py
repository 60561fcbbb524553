"""A loss over a policy: what it is, what it reports, and its gradient.

The loss always gives what it would give if it saw the whole batch at once. One that streams is evaluated micro-batch
by micro-batch, each one's graph being used and freed at once. Any other is evaluated once, on the scores of the
whole batch, and its gradient goes back through :class:`.forward.KeptScores`.

Everything stays on the policy's device, and the host runs ahead of it, until the operation's end: then all figures
come over at once, those among them that tell whether anything was not finite. Who is to blame is asked only then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_ids, sent
from gradwire_losses.monitoring import usual_range_warnings
from gradwire_losses.outputs import Figure, LossOutput, Metric, merge_metrics, settled
from gradwire_losses.registry import DivergenceConfig, LossConfig, LossSpec, TemperatureConfig
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.accumulate import GradientAccumulator, GradientCollector, Key
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.forward import (
    HEAD_OF_SCORE,
    SEQUENCE_SCORES,
    KeptScores,
    Teacher,
    check_candidates,
    check_scores,
    score_batch,
)
from gradwire_server.engine.planner import Budget, MicroBatch, divided, split
from gradwire_server.engine.policy import Policy

Reference = Callable[[Batch, float], Tensor]
"""``(batch, temperature) -> [T]`` log-probabilities of the scored tokens under the reference that the loss names."""

CUSTOM: Key = ("custom", "weight")


@dataclass(frozen=True)
class LossEvaluation:
    """What a forward or a forward and backward gave.

    Attributes:
        loss: None where no loss was asked for.
        metrics: by name, "loss" among them where there is one.
        outputs: by name: ``[T, ...]`` of the scored tokens or (SEQUENCE_SCORES) ``[S, ...]``, float32 on the CPU, in
            the batch's order.
        row_lengths: ``[S]`` scored tokens of each sequence.
        num_tokens: that went through the model, padding not counted.
        num_loss_tokens: that were scored.
        num_microbatches: forwards of the trunk, those computed again not counted.
        recomputed: whether the activation budget was exceeded and part was computed twice.
        out_of_memory: whether memory ran out, and smaller micro-batches had to do.
        warnings: for the person.
    """

    loss: float | None
    metrics: dict[str, float]
    outputs: dict[str, Tensor]
    row_lengths: Tensor
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    num_microbatches: int
    recomputed: bool = False
    out_of_memory: bool = False
    warnings: list[str] = field(default_factory=list)


def forward(
    policy: Policy,
    batch: Batch,
    loss: LossSpec | None = None,
    config: LossConfig | None = None,
    *,
    reference: Reference | None = None,
    teacher: Policy | None = None,
    outputs: Collection[str] = (),
    temperature: float = 1.0,
    budget: Budget,
) -> LossEvaluation:
    """Scores, and a loss of them where one is given; no gradients, no dropout.

    Args:
        reference: needed where the loss needs ``ref_logprobs``.
        teacher: the same reference's weights, needed where the loss needs ``divergence``.
        outputs: names of the scores to return.
        temperature: divides the logits where there is no loss; a loss says it in its own arguments.

    Raises:
        OperationError: UNSUPPORTED, INVALID_ARGUMENT, INVALID_BATCH.
    """
    names, compared = set(outputs), None
    if loss is not None and config is not None:
        needed = _needed(loss, config, batch, policy)
        names |= needed - {"ref_logprobs"}
        temperature = loss_temperature(config)
        compared = _teacher(loss, config, teacher, needed)
    check_scores(policy, outputs, compared)
    scores = score_batch(policy, batch, names, temperature=temperature, teacher=compared, budget=budget)
    sums = _LossSums(loss.name if loss else "")
    if loss is not None and config is not None:
        if "ref_logprobs" in needed:
            scores["ref_logprobs"] = _reference_logprobs(loss, config, reference, batch, policy)
        with torch.no_grad():
            sums.add(_call(loss, batch.to(policy.device), {name: scores[name] for name in needed}, config))
        sums.settle()
    num_microbatches = len(split(batch, budget.microbatch_tokens, policy.packing()))
    return _evaluation(batch, scores, outputs, num_microbatches, sums if loss else None)


class Training:
    """A ``forward_backward``: checked, and with what its references say; then evaluated in parts, and ended.

    Args:
        accumulator: takes the gradient; an error leaves it as it was.

    Attributes:
        policy, batch, loss: as given.
        names: of the scores that the policy is to give.
        temperature, teacher, budget: with which.
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
    ) -> None:
        needed = _needed(loss, config, batch, policy)
        self.policy, self.batch, self.loss, self.budget = policy, batch, loss, budget
        self.names = (needed - {"ref_logprobs"}) | set(outputs)
        self.teacher = _teacher(loss, config, teacher, needed)
        check_scores(policy, outputs, self.teacher)
        check_scores(policy, self.names, self.teacher, field="loss_fn")
        check_candidates(batch, self.names)
        self.temperature = loss_temperature(config)
        self.micros = split(batch, budget.microbatch_tokens, policy.packing(training=True))
        self._config, self._accumulator, self._outputs = config, accumulator, outputs
        self._used = needed - {"ref_logprobs"}
        self._ref_logprobs = None
        if "ref_logprobs" in needed:
            self._ref_logprobs = _reference_logprobs(loss, config, reference, batch, policy)
        self._sums = _LossSums(loss.name)
        self._evaluated: list[_Evaluated] = []
        self._output_scores: dict[str, Tensor] = {}

    def parts(self) -> list[Part]:
        """What the loss is shown at a time."""
        if self.loss.streams(self._config, frozenset(self.batch.fields)):
            return [_alone(self.batch, micro) for micro in self.micros]
        return [Part(self.batch, self.micros)]

    def evaluate(self, part: Part, scores: Mapping[str, Tensor]) -> dict[Key, dict[str, Tensor]]:
        """The loss of a part, and its gradient for each of the scores.

        Raises:
            OperationError: INVALID_BATCH.
        """
        used = {name: scores[name] for name in self._used}
        if self._ref_logprobs is not None:
            index, whole = part.tokens, self._ref_logprobs
            used["ref_logprobs"] = whole if index is None else whole[beside(index, whole)]
        found = _evaluate(self.loss, self._config, part, used, self.policy.device)
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
        found = _evaluation(self.batch, self._output_scores, self._outputs, num_microbatches, sums)
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
            kept = KeptScores(
                policy,
                part.batch,
                training.names,
                temperature=training.temperature,
                teacher=training.teacher,
                budget=training.budget,
                micros=part.micros,
                keep_single=True,
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
                waiting = deque(_alone(training.batch, micro) for micro in left)
    return training.end(collector, num_microbatches, recomputed)


def kept_forward(
    policy: Policy, batch: Batch, names: Collection[str], *, temperature: float = 1.0, budget: Budget
) -> tuple[KeptScores, LossEvaluation]:
    """The first half of a loss that the client computes: scores, whose graph waits for :func:`custom_backward`."""
    kept = KeptScores(policy, batch, names, temperature=temperature, budget=budget)
    evaluation = _evaluation(batch, kept.by_name, names, kept.num_microbatches, None)
    return kept, replace(evaluation, recomputed=kept.recomputed)


def custom_backward(
    kept: KeptScores, gradients: Mapping[str, Tensor], weight: float, accumulator: GradientAccumulator
) -> None:
    """The second half: the gradient of the client's loss, in proportion to ``weight``, into the accumulator.

    Args:
        gradients: name of a score -> the loss's gradient with respect to it, flat, as the scores were.
        weight: what the loss averages over; calls of one accumulation are averaged by it.

    Raises:
        OperationError: INVALID_ARGUMENT, or NON_FINITE with the row to blame.
    """
    if not 0 < weight < math.inf:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"weight is {weight}; it is what the loss averages over, and positive",
            field="weight",
            rule="weight > 0",
        )
    for name, gradient in gradients.items():
        if name not in kept.by_name or gradient.shape != kept.by_name[name].shape:
            there = f"{tuple(kept.by_name[name].shape)}" if name in kept.by_name else "not among the scores asked for"
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"a gradient of shape {tuple(gradient.shape)} came for {name}, which is {there}",
                field=f"grad_{name}",
                rule="shaped as the scores were",
            )
    _check_finite(
        kept.batch, gradients, torch.arange(kept.batch.num_examples), "the gradient that the client computed for"
    )
    with GradientCollector(kept.policy.trainable_parameters()) as collector:
        device = kept.policy.device
        moved = {name: sent(gradient, device) for name, gradient in gradients.items()}
        kept.backward(collector, {CUSTOM: moved})
    if not collector.finite():
        raise OperationError(
            training_pb2.ERROR_CODE_NON_FINITE, "the gradient with respect to the weights is not finite"
        )
    accumulator.merge(collector.by_key, {CUSTOM: weight}, scale=weight)


def loss_temperature(config: LossConfig) -> float:
    """What divides the logits before a loss's log-probabilities: its argument ``temperature``, or 1."""
    return config.temperature if isinstance(config, TemperatureConfig) else 1.0


# ------------------------------------------------------------------ parts of a batch


@dataclass(frozen=True)
class Part:
    """What a loss is shown at a time, and as which micro-batches it is computed.

    Attributes:
        whole: the one micro-batch that it is, with indices into the whole batch; None where it is the whole batch.
    """

    batch: Batch
    micros: list[MicroBatch]
    whole: MicroBatch | None = None

    @property
    def examples(self) -> Tensor | None:
        return None if self.whole is None else self.whole.examples

    @property
    def tokens(self) -> Tensor | None:
        return None if self.whole is None else self.whole.tokens

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.batch.num_examples) if self.whole is None else self.whole.examples

    def place(self, whole: Batch, name: str, values: Tensor, into: dict[str, Tensor]) -> None:
        """Puts this part's scores where they belong in those of the whole batch."""
        if self.whole is None:
            into[name] = values
        else:
            index = self.whole.sequences if name in SEQUENCE_SCORES else self.whole.tokens
            count = whole.num_sequences if name in SEQUENCE_SCORES else whole.num_scored
            if name not in into:
                into[name] = values.new_zeros(count, *values.shape[1:])
            into[name][beside(index, values)] = values


def _alone(batch: Batch, micro: MicroBatch) -> Part:
    if micro.batch is batch:
        return Part(batch, [micro])
    examples, sequences, tokens = (torch.arange(len(each)) for each in (micro.examples, micro.sequences, micro.tokens))
    own = replace(micro, examples=examples, sequences=sequences, tokens=tokens)
    return Part(micro.batch, [own], micro)


class _LossSums:
    """A loss's terms and metrics, put together from its parts; numbers once they are settled.

    Attributes:
        finite: whether terms, and what else was settled with them, are; False may be an overflow of mere totals.
    """

    def __init__(self, loss_name: str) -> None:
        self._loss_name = loss_name
        self._sums: dict[str, float] = {}
        self._units: dict[str, str] = {}
        self._counts: dict[str, float] = {}
        self._terms: list[dict[str, list[Figure]]] = []
        self._metrics: list[Mapping[str, Metric]] = []
        self.finite = True

    def add(self, output: LossOutput) -> None:
        self._terms.append({name: [term.sum.detach(), term.count] for name, term in output.terms.items()})
        self._units |= {name: term.unit for name, term in output.terms.items()}
        self._metrics.append(dict(output.metrics))

    def settle(self, *checks: Any) -> None:
        """Waits for the figures of all parts, and for ``checks``: 0-d tensors, in lists, that are to be finite."""
        terms, self._metrics, checked = settled([self._terms, self._metrics, list(checks)])
        for part in terms:
            for name, (total, count) in part.items():
                self._sums[name] = self._sums.get(name, 0.0) + total
                self._counts[name] = count if self._units[name] == "sum" else self._counts.get(name, 0.0) + count
        self.finite = all(map(math.isfinite, [*self._sums.values(), *_flat(checked)]))

    @property
    def counts(self) -> dict[Key, float]:
        by_key: dict[Key, float] = {}
        for name, unit in self._units.items():
            if by_key.setdefault((self._loss_name, unit), self._counts[name]) != self._counts[name]:
                raise ValueError(
                    f"terms of {self._loss_name} count different numbers of {unit}: give them different units"
                )
        return by_key

    def loss(self) -> float:
        return sum(total / self._counts[name] for name, total in self._sums.items() if self._counts[name])

    def metrics(self) -> dict[str, float]:
        merged = {name: metric.value() for name, metric in merge_metrics(self._metrics).items()}
        return {"loss": self.loss()} | merged


# ------------------------------------------------------------------ the loss and the gradient of its scores


def _needed(loss: LossSpec, config: LossConfig, batch: Batch, policy: Policy) -> frozenset[str]:
    """What the loss asks for, and what it takes where the run has the head for it."""
    kind = policy.head.kind if policy.head else ""
    optional = frozenset(name for name in loss.optional_scores if HEAD_OF_SCORE.get(name, kind) == kind)
    try:
        return optional | loss.scores(config, frozenset(batch.fields))
    except BatchError as error:
        raise OperationError.from_batch_error(error) from error


def _call(
    loss: LossSpec, batch: Batch, scores: Mapping[str, Tensor], config: LossConfig, rows: Tensor | None = None
) -> LossOutput:
    """``rows``: of the caller's batch, for the examples of this one, where they are not the same."""
    try:
        return loss.function(batch, Scores(scores), config)
    except BatchError as error:
        if rows is not None and error.row is not None:
            error.row = int(rows[error.row])
        raise OperationError.from_batch_error(error) from error


@dataclass(frozen=True)
class _Evaluated:
    """A loss's value on a part of the batch, and the gradient of each unit's sum for each score."""

    loss: LossSpec
    config: LossConfig
    part: Part
    scores: Mapping[str, Tensor]
    output: LossOutput
    gradients: dict[Key, dict[str, Tensor]]

    def totals(self) -> list[Tensor]:
        """0-d: not finite if any of the scores and gradients is not, or if so many numbers are too large a sum."""
        found = [*self.scores.values(), *(one for by_name in self.gradients.values() for one in by_name.values())]
        return [values.sum() for values in found if values.is_floating_point()]

    def check_finite(self) -> None:
        """Looks for who is to blame.

        Raises:
            OperationError: NON_FINITE, with the row, where scores, the loss or a gradient are not finite.
        """
        part, rows = self.part, self.part.rows
        _check_finite(part.batch, self.scores, rows, "the model gave non-finite")
        if not all(math.isfinite(term.sum.item()) for term in self.output.terms.values()):
            raise _non_finite_loss(self.loss, self.config, part, self.scores)
        for gradients in self.gradients.values():
            _check_finite(part.batch, gradients, rows, f"{self.loss.name} has a non-finite gradient for")


def _evaluate(
    loss: LossSpec, config: LossConfig, part: Part, scores: Mapping[str, Tensor], device: torch.device
) -> _Evaluated:
    leaves = {
        name: values.requires_grad_() if values.is_floating_point() and name != "ref_logprobs" else values
        for name, values in ((name, values.detach()) for name, values in scores.items())
    }
    output = _call(loss, part.batch.to(device), leaves, config, part.examples)
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
    return _Evaluated(loss, config, part, scores, output, by_key)


def _flat(numbers: Any) -> list[float]:
    return [one for part in numbers for one in _flat(part)] if isinstance(numbers, list) else [numbers]


def _check_finite(batch: Batch, values: Mapping[str, Tensor], rows: Tensor, what: str) -> None:
    """``rows``: of the caller's batch, for the examples of this one."""
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


def _non_finite_loss(loss: LossSpec, config: LossConfig, part: Part, scores: Mapping[str, Tensor]) -> OperationError:
    """The error that names the first row whose own loss is not finite, or no row if only the whole is so."""
    row = None
    scores = {name: values.cpu() for name, values in scores.items()}
    sequences = segment_ids(part.batch.group_sizes)
    for example in range(part.batch.num_examples):
        of_sequence = sequences == example
        of_token = of_sequence.repeat_interleave(part.batch.row_lengths)
        own = {name: values[of_sequence if name in SEQUENCE_SCORES else of_token] for name, values in scores.items()}
        with torch.no_grad():
            output = _call(loss, part.batch.select(torch.tensor([example])), own, config)
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


def _reference_logprobs(
    loss: LossSpec, config: LossConfig, reference: Reference | None, batch: Batch, policy: Policy
) -> Tensor:
    if reference is None or getattr(config, "reference_model", None) is None:
        raise _no_reference(loss)
    logprobs = reference(batch, loss_temperature(config)).detach()
    return logprobs.to(policy.device, torch.float32, non_blocking=True)


def _teacher(loss: LossSpec, config: LossConfig, teacher: Policy | None, needed: Collection[str]) -> Teacher | None:
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


def _evaluation(
    batch: Batch, scores: Mapping[str, Tensor], outputs: Collection[str], num_microbatches: int, sums: _LossSums | None
) -> LossEvaluation:
    metrics = sums.metrics() if sums else {}
    return LossEvaluation(
        loss=sums.loss() if sums else None,
        metrics=metrics,
        outputs={name: scores[name].detach().to("cpu", torch.float32) for name in outputs},
        row_lengths=batch.row_lengths,
        num_sequences=batch.num_sequences,
        num_tokens=len(batch.input_ids),
        num_loss_tokens=batch.num_scored,
        num_microbatches=num_microbatches,
        warnings=usual_range_warnings(metrics),
    )
