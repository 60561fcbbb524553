"""A training step, from top to bottom: what a call asks for, what it computes, and what its run keeps.

    resolve      a call, its columns -> Step       reads the loss, joins the parts of a batch, finds reference and
                                                   teacher; changes nothing
    pass_over    Steps -> Passed                   plans micro-batches, scores them, evaluates the loss, and goes back
                                                   into the weights; knows no run but through its step
    commit       Passed -> LossEvaluation          adds the gradient to the run's accumulation, the only change there is

A run alone is a group of one; several LoRA runs on one base share the forward and the backward of the trunk. The
optimizer's step, which ends an accumulation, is in :mod:`.training.optimizer_step`.

The result always equals that of one call of the loss on the whole batch. A streaming loss is evaluated micro-batch by
micro-batch, and each graph is used and freed at once. Any other loss is evaluated once, on the scores of the whole
batch, and its gradient goes back through :class:`.differentiable_scores.DifferentiableScores`. So is every loss of a
mixture of experts with a load-balancing loss (:mod:`.routers`), which is a function of the whole batch: its gradient
joins that of the loss's first unit, times what this unit is divided by.

Who computes the micro-batches is the executor's business (:mod:`.executor`): one process, or several that each compute
some, get the scores of the others, and evaluate the whole loss, or the other parts without their way back. An error is
shared before anything is kept.

All tensors stay on the policy's device, and the host runs ahead of it until the figures of the whole pass are
transferred at once, including the checks for non-finite values. The row at fault is searched for only if one fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from gradwire_losses.batch import Batch, BatchError, Scores, beside
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import (
    DivergenceConfig,
    HeldReference,
    LossConfig,
    LossSpec,
    ReferenceConfig,
    TemperatureConfig,
)
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.executor import Executor, Scored, Turn, executor_of
from gradwire_server.engine.failures import tried
from gradwire_server.engine.lanes import Gradients, Key
from gradwire_server.engine.model.layers.dropout import seeded
from gradwire_server.engine.model.layers.routers import PROBABILITIES, RouterSums, balance_hint
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.forward import Scoring
from gradwire_server.engine.scoring.planner import Budget, MicroBatch, split_for_training
from gradwire_server.engine.scoring.score_types import (
    HEAD_OF_SCORE,
    SEQUENCE_SCORES,
    Teacher,
    check_candidates,
    check_scores,
    entries_of,
)
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import OFFLOADED, References
from gradwire_server.engine.training.accumulation import GradientCollector, shared_norms
from gradwire_server.engine.training.columns import BatchParts, Columns, read_columns, read_loss, refuse_part
from gradwire_server.engine.training.differentiable_scores import DifferentiableScores, batch_of, combined
from gradwire_server.engine.training.finite import check_finite, non_finite_loss
from gradwire_server.engine.training.loss_report import LossEvaluation, LossSums, reported

Reference = Callable[[Batch, float], Tensor]
"""``(batch, temperature) -> [T]`` log-probabilities of the scored tokens under the loss's reference."""
ADVANTAGES = "advantages"
"""An output that is no score of the policy: the loss's own, where it has them."""


# ------------------------------------------------------------------ resolve


@dataclass(eq=False, kw_only=True)
class Step:
    """A loss on a batch, with all that its pass needs.

    Attributes:
        scoring: The scores that it needs of the policy on the whole batch, and those to return.
        own_scores: Names of those that the loss needs.
        outputs: Names of those to return, and :data:`ADVANTAGES`.
        streams: Whether the loss of the batch is the sum of those of its micro-batches.
        ref_logprobs: ``[T]`` reference log-probabilities, on the policy's device; None if the loss needs none.
        adds_head: Whether the run has no head yet, and the pass needs it to have a value head; see :func:`head_added`.
        dropout_seed: Identifies the run and operation for dropout masks.
        executor: Computes the micro-batches.
        rng: Makes the context in which the loss draws random numbers for a part with this number; by default it draws
            from the generators as they are.
    """

    loss: LossSpec
    config: LossConfig
    scoring: Scoring
    own_scores: frozenset[str]
    outputs: tuple[str, ...]
    streams: bool
    ref_logprobs: Tensor | None
    adds_head: bool
    dropout_seed: str
    executor: Executor
    rng: Callable[[int], AbstractContextManager[object]] = nullcontext

    @property
    def policy(self) -> Policy:
        return self.scoring.policy

    @property
    def batch(self) -> Batch:
        return self.scoring.batch

    @cached_property
    def micros(self) -> list[MicroBatch]:
        """The micro-batches that go through the model."""
        return split_for_training(self.policy, self.batch, self.scoring.budget)

    @property
    def parts(self) -> list[list[MicroBatch]]:
        """The micro-batches of each evaluation of the loss: one by one if it streams, else all together."""
        return [[micro] for micro in self.micros] if self.streams else [self.micros]

    @property
    def can_join(self) -> bool:
        """Whether others may share its pass: one micro-batch with scored tokens, without images or an added head."""
        alone = self.adds_head or self.batch.images is not None
        return not alone and len(self.micros) == 1 and len(self.scoring.positions) > 0


def resolve(
    run: EngineRun,
    call: training_pb2.LossCall,
    columns: Columns,
    *,
    references: References,
    budget: Budget,
    agreement: Agreement | None = None,
) -> Step:
    """Find all that a run's training operation needs; the columns may be the last part of a batch.

    A run that compares with its moving average for the first time gets one, which an operation that fails drops.

    Raises:
        OperationError: The call or its batch is invalid.
    """
    loss, config = read_loss(call)
    if call.model:
        raise invalid("forward_backward trains the run's own weights; model is for forward", "model")
    refuse_part(call)
    parts = run.accumulator.parts
    batch = (
        read_columns(loss, columns, run.policy, call.maybe_padded)
        if parts is None
        else parts.read_last(loss, call, columns, run.policy)
    )
    reference, teacher = compared_with(references, run, config, budget)
    return checked(
        loss, config, run.policy, batch, outputs=call.outputs, reference=reference, teacher=teacher, budget=budget,
        adds_heads=True, dropout_seed=run.dropout_seed, agreement=agreement,
    )  # fmt: skip


def compared_with(
    references: References, run: EngineRun, config: LossConfig, budget: Budget
) -> tuple[Reference | None, Policy | None]:
    """The reference and the teacher that a loss names; None if it has none."""
    if not isinstance(config, ReferenceConfig) or config.reference_model is None:
        return None, None
    asked, held = config.reference_model, None
    if isinstance(asked, HeldReference):
        held = OFFLOADED if asked.offload else asked.quantize
    name = asked.name if isinstance(asked, HeldReference) else asked
    found = references.resolve(name, run, dtype=config.reference_dtype, held=held)
    teacher = found.policy if isinstance(config, DivergenceConfig) else None
    return lambda batch, temperature: references.logprobs(found, batch, temperature, budget), teacher


def checked(
    loss: LossSpec,
    config: LossConfig,
    policy: Policy,
    batch: Batch,
    *,
    outputs: Collection[str] = (),
    reference: Reference | None = None,
    teacher: Policy | None = None,
    budget: Budget,
    adds_heads: bool = False,
    dropout_seed: str = "",
    agreement: Agreement | None = None,
) -> Step:
    """Check a loss on a batch, and compute the reference's log-probabilities.

    Args:
        outputs: Names of further scores to compute, and :data:`ADVANTAGES`.
        reference: Required if the loss needs ``ref_logprobs``.
        teacher: The same reference's policy; required if the loss needs ``divergence``.
        adds_heads: Whether a policy without a head may be given a value head. So is one for a loss that can do without
            a critic, but not with this batch: ``enhanced_ppo`` on a batch with neither ``values`` nor ``advantages``.
        agreement: This process's agreement with the others of the engine; by default it is alone.
    """
    needed = _needed_scores(loss, config, batch, policy.head.kind if policy.head else "")
    adds_head = adds_heads and policy.head is None and "values" in loss.optional_scores & needed
    if adds_head:
        needed = _needed_scores(loss, config, batch, "value")
    own, further = needed - {"ref_logprobs"}, set(outputs) - {ADVANTAGES}
    added = {"values"} if adds_head else set()
    temperature = config.temperature if isinstance(config, TemperatureConfig) else 1.0
    compared: Teacher | None = None
    if "divergence" in needed:
        if not isinstance(config, DivergenceConfig):
            raise TypeError(
                f"{loss.name} needs divergence: its config has to be a DivergenceConfig, which says which one"
            )
        if teacher is None or config.reference_model is None:
            raise _no_reference(loss)
        compared = Teacher(teacher, config.beta)
    check_scores(policy, further - added, compared)
    check_scores(policy, own - added, compared, field="loss_fn")
    check_candidates(batch, own | further)
    ref_logprobs = None
    if "ref_logprobs" in needed:
        if reference is None or getattr(config, "reference_model", None) is None:
            raise _no_reference(loss)
        ref_logprobs = reference(batch, temperature).detach().to(policy.device, torch.float32, non_blocking=True)
    streams = loss.streams(config, frozenset(batch.fields)) and not policy.router_aux_loss_coef
    step = Step(
        loss=loss, config=config, scoring=Scoring(policy, batch, own | further, temperature, compared, budget),
        own_scores=own, outputs=tuple(outputs), streams=streams, ref_logprobs=ref_logprobs, adds_head=adds_head,
        dropout_seed=dropout_seed, executor=executor_of(budget.lanes, agreement),
    )  # fmt: skip
    if streams and budget.lanes > 1:  # processes have different parts
        step.rng = partial(seeded, f"{dropout_seed}/loss")
    return step


def _needed_scores(loss: LossSpec, config: LossConfig, batch: Batch, head: str) -> frozenset[str]:
    """Scores that a loss requires, and its optional scores that a policy with this kind of head can compute."""
    optional = frozenset(name for name in loss.optional_scores if HEAD_OF_SCORE.get(name, head) == head)
    try:
        return optional | loss.scores(config, frozenset(batch.fields))
    except BatchError as error:
        raise OperationError.from_batch_error(error) from error


def _no_reference(loss: LossSpec) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_ARGUMENT,
        f'{loss.name} compares with a reference model and none is named: give reference_model, "base" say',
        field="reference_model",
        rule="required",
    )


# ------------------------------------------------------------------ pass over


@dataclass(frozen=True, eq=False)
class Passed:
    """The result of a pass over a step's batch.

    Attributes:
        report: Loss, metrics, and the scores to return.
        gradients: Key -> parameter name -> summed gradient, which is nobody else's.
        counts: Key -> divisor of its sum.
        norm: Norm of the gradients, 0-d.
    """

    report: LossEvaluation
    gradients: Mapping[Key, Gradients]
    counts: Mapping[Key, float]
    norm: Tensor


def pass_over(steps: Sequence[Step]) -> list[Passed | None]:
    """Compute losses and their gradients.

    Args:
        steps: One step, or several that :attr:`Step.can_join` and that :func:`fit`, of policies that satisfy
            :func:`.shared_forward.can_go_together`.

    Returns:
        For each what it gives, or None if it failed in company: repeating it alone gives its error.

    Raises:
        OperationError: Of a step alone: INVALID_BATCH, or NON_FINITE with the row at fault.
        Exception: Any error in the shared computation.
    """
    first, recomputed = steps[0], False
    scorings = [step.scoring for step in steps]
    parts = list(zip(*(step.parts for step in steps), strict=True))  # each with the micro-batches of every step
    # Either the parts are spread over the processes, or the micro-batches of the one part there is.
    outer, inner = first.executor.split(streams=first.streams)
    values: dict[int, Sequence[LossOnPart | None]] = {}

    def over_part(turn: Turn) -> Scored:
        nonlocal recomputed
        part = parts[turn.number]
        scores = DifferentiableScores(scorings, part, keep_single=True, dropout_seed=first.dropout_seed, executor=inner)
        gradients: list[Mapping[Key, Mapping[str, Tensor]]] = [{}] * len(steps)
        with inner.together("loss"):
            if not turn.repeated:
                values[turn.number] = _losses_on(steps, part, scores.by_name, scores.routers, turn.number)
                gradients = [{} if value is None else value.gradients for value in values[turn.number]]
        scores.backward(collectors, outer.in_all(gradients), lane=turn.number % outer.lanes, repeated=turn.repeated)
        recomputed |= scores.recomputed
        return scores.by_micro[0] if first.streams else ()

    with ExitStack() as stack:
        trained = [step.policy.trainable_parameters() for step in steps]
        collectors = [stack.enter_context(GradientCollector(each, first.executor)) for each in trained]
        scored = outer.score("parts", len(parts), over_part)
    norms = shared_norms(collectors, first.policy.device)
    for number, theirs in enumerate(scored):  # the loss on the parts of other processes follows from their scores
        if number not in values:
            values[number] = _losses_on(steps, parts[number], *combined(scorings, parts[number], [theirs]), number)
    by_step = zip(*map(values.__getitem__, range(len(parts))), strict=True)
    return [
        tried(partial(_summed_up, step, own, collector, norm, recomputed=recomputed), alone=len(steps) == 1)
        for step, own, collector, norm in zip(steps, by_step, collectors, norms, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class LossOnPart:
    """A loss's value on a part of the batch, and the gradient of each unit's sum in each score.

    Attributes:
        micro: The part; None if it is the whole batch.
        outputs: The scores to return.
        routers: Decisions of the routers of a mixture of experts on the part; None for another model.
        gradients: Key -> score -> gradient.
        totals: 0-d sums of all scores and gradients: not finite if any entry is not, or if a sum overflows.
    """

    step: Step
    micro: MicroBatch | None
    scores: Mapping[str, Tensor]
    output: LossOutput
    outputs: Mapping[str, Tensor]
    routers: RouterSums | None
    gradients: Mapping[Key, Mapping[str, Tensor]]
    totals: list[Tensor]

    def check_finite(self) -> None:
        """Search for the row with a non-finite value, which waits for the device.

        Raises:
            OperationError: NON_FINITE, with the row, if scores, the loss or a gradient are not finite.
        """
        step, micro = self.step, self.micro
        batch = step.batch if micro is None else micro.batch
        rows = torch.arange(batch.num_examples) if micro is None else micro.examples
        check_finite(batch, self.scores, rows, "the model gave non-finite")
        if not all(math.isfinite(term.sum.item()) for term in self.output.terms.values()):
            raise non_finite_loss(step.loss.name, batch, rows, self.scores, partial(_call, step.loss, step.config))
        for by_name in self.gradients.values():
            gradients = {name: values for name, values in by_name.items() if name in self.scores}
            check_finite(batch, gradients, rows, f"{step.loss.name} has a non-finite gradient for")


def _losses_on(
    steps: Sequence[Step],
    parts: Sequence[Sequence[MicroBatch]],
    by_name: Sequence[Mapping[str, Tensor]],
    routers: RouterSums | None,
    number: int,
) -> list[LossOnPart | None]:
    """Evaluate each step's loss on its part with this number; in company None for one that raises.

    Args:
        by_name: Scores of each part, on the policy's device.
        routers: Decisions of the routers of a mixture of experts on a part alone; None for another model.
    """

    def evaluate(step: Step, part: Sequence[MicroBatch], computed: Mapping[str, Tensor]) -> LossOnPart:
        with step.rng(number):
            return _loss_on(step, part, computed, routers)

    return [tried(partial(evaluate, *each), alone=len(steps) == 1) for each in zip(steps, parts, by_name, strict=True)]


def _loss_on(
    step: Step, part: Sequence[MicroBatch], computed: Mapping[str, Tensor], routers: RouterSums | None
) -> LossOnPart:
    """Evaluate the loss on a part, and compute the gradient of each of its units.

    With the load-balancing loss, the first unit has its gradient too, as that of :data:`.routers.PROBABILITIES`: times
    its coefficient, and times the unit's divisor.
    """
    batch = batch_of(step.scoring, part)
    micro = None if batch is step.batch else part[0]
    scores = _own_scores(step, micro, computed)
    leaves = {
        name: values.requires_grad_() if values.is_floating_point() and name != "ref_logprobs" else values
        for name, values in ((name, values.detach()) for name, values in scores.items())
    }
    rows = None if micro is None else micro.examples
    output = _call(step.loss, step.config, batch.to(step.policy.device), leaves, rows)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    units: dict[str, list[Tensor]] = {}
    for term in output.terms.values():
        if term.sum.requires_grad:
            units.setdefault(term.unit, []).append(term.sum)
    by_key: dict[Key, dict[str, Tensor]] = {}
    for unit, terms in units.items():
        total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
        of_leaves = torch.autograd.grad(total, list(trained.values()), allow_unused=True, retain_graph=len(units) > 1)
        by_key[step.loss.name, unit] = {
            name: gradient for name, gradient in zip(trained, of_leaves, strict=True) if gradient is not None
        }
    floating = (*scores.values(), *(one for by_name in by_key.values() for one in by_name.values()))
    totals = [values.sum() for values in floating if values.is_floating_point()]
    coefficient = step.policy.router_aux_loss_coef
    if routers is not None and coefficient and by_key:
        unit = next(iter(units))
        count = next(term.count for term in output.terms.values() if term.unit == unit)
        by_key[step.loss.name, unit][PROBABILITIES] = routers.balance_gradient() * (coefficient * count)
    wanted = {name: output.advantages if name == ADVANTAGES else computed[name] for name in step.outputs}
    outputs = {name: values.detach() for name, values in wanted.items() if values is not None}
    return LossOnPart(step, micro, scores, output, outputs, routers, by_key, totals)


def loss_on_batch(step: Step, computed: Mapping[str, Tensor]) -> LossOutput:
    """Evaluate a step's loss on the whole batch, without gradients, given the scores of :attr:`Step.scoring`."""
    with torch.no_grad():
        return _call(step.loss, step.config, step.batch.to(step.policy.device), _own_scores(step, None, computed))


def _own_scores(step: Step, micro: MicroBatch | None, computed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss's scores of a micro-batch or of the whole batch, of those that were computed with the policy."""
    scores = {name: computed[name] for name in step.own_scores}
    if (whole := step.ref_logprobs) is not None:
        scores["ref_logprobs"] = whole if micro is None else whole[beside(micro.tokens, whole)]
    return scores


def _call(
    loss: LossSpec, config: LossConfig, batch: Batch, scores: Mapping[str, Tensor], rows: Tensor | None = None
) -> LossOutput:
    """Call a loss on a batch, whose examples have these rows ``[b]`` in the caller's batch; None if the same."""
    try:
        return loss.function(batch, Scores(scores), config)
    except BatchError as error:
        if rows is not None and error.row is not None:
            error.row = int(rows[error.row])
        raise OperationError.from_batch_error(error) from error


def _summed_up(
    step: Step, values: Sequence[LossOnPart | None], collector: GradientCollector, norm: Tensor, *, recomputed: bool
) -> Passed | None:
    """Sum up a pass, of which all figures are fetched from the device here; None if the loss failed on a part.

    Args:
        collector: The gradient, whose norm is ``norm``.
        recomputed: Whether any micro-batch was computed twice.

    Raises:
        OperationError: NON_FINITE, with the row at fault where one is found.
    """
    sums, output_scores = LossSums(step.loss.name), dict[str, Tensor]()
    routers: RouterSums | None = None
    whole = [value for value in values if value is not None]
    if len(whole) < len(values):
        return None
    for value in whole:
        sums.add(value.output)
        for name, entries in value.outputs.items():
            if value.micro is None:
                output_scores[name] = entries
                continue
            if name not in output_scores:
                count = step.batch.num_sequences if name in SEQUENCE_SCORES else step.batch.num_scored
                output_scores[name] = entries.new_zeros(count, *entries.shape[1:])
            output_scores[name][beside(entries_of(value.micro, name), entries)] = entries
        if value.routers is not None:
            routers = value.routers if routers is None else routers + value.routers
    if routers is not None:
        sums.add_metrics(routers.metrics())
    outputs = sums.settle([value.totals for value in whole], norm, outputs=output_scores)
    if not sums.finite:
        for value in whole:
            value.check_finite()
    if not sums.finite and not collector.finite():
        raise OperationError(
            training_pb2.ERROR_CODE_NON_FINITE,
            f"the gradient of {step.loss.name} with respect to the weights is not finite, though loss and scores "
            "are; nothing was accumulated. A lower learning rate, or float32 weights, may help",
        )
    activations = Counter(micro.activations.label for micro in step.micros)
    report = reported(step.batch, outputs, step.micros, sums, recomputed=recomputed, activations=activations)
    return Passed(report, collector.by_key, sums.counts, norm)


def fit(steps: Sequence[Step], most_tokens: int) -> bool:
    """Whether steps that :attr:`Step.can_join` compute at most ``most_tokens`` together."""
    micros = [step.micros[0] for step in steps]
    if steps[0].policy.packing(training=True) is not Packing.PADDED:
        return sum(micro.computed_tokens for micro in micros) <= most_tokens
    width = max(int(micro.batch.lengths.max()) for micro in micros)
    return sum(micro.batch.num_sequences for micro in micros) * width <= most_tokens


# ------------------------------------------------------------------ commit


def commit(run: EngineRun, step: Step, passed: Passed) -> LossEvaluation:
    """Add the gradient of a pass to its run's accumulation; returns the report with hints about the run."""
    before = run.accumulator.counts
    loss, report = step.loss, passed.report
    hints = list(run.advisor.hints(loss.name, loss.hints, report.metrics, run.step))
    if run.step == 0 and not before:
        if said := balance_hint(run.policy.model, run.config, run.policy.router_aux_loss_coef):
            hints.append(said)
        if draws := run.policy.draws:
            hints.append(
                f"random numbers are drawn in training, as this run asked for: {', '.join(draws)}; so its "
                "log-probabilities differ from those of samples, of forward and of a reference, which draw nothing; "
                "and the beginnings that rows have in common are computed for each of them"
            )
    again = any(count and name == loss.name for (name, _), count in before.items())
    if again and not loss.streams(step.config, frozenset(step.batch.fields)):
        hints.append(
            f"{loss.name} takes a statistic of its batch ({loss.whole_batch}), and took one of each call since the "
            "last step; to take one of all, send them as one batch, or all but the last with accumulate=True"
        )
    run.accumulator.merge(passed.gradients, passed.counts, norm=passed.norm)
    run.accumulator.parts = None
    return replace(report, warnings=[*report.warnings, *hints])


def commit_nothing(run: EngineRun, step: Step, error: OperationError) -> LossEvaluation:
    """Leave out a batch with non-finite results: it counts 0, and an optimizer step may still follow."""
    run.accumulator.parts = None
    run.accumulator.merge({}, {(step.loss.name, "skipped"): 0.0})
    report = reported(step.batch, {}, [], None)
    left_out = f"left out (on_nonfinite='skip'): {error.message}"
    return replace(report, loss=math.nan, metrics={"loss": math.nan}, warnings=[left_out])


def hold(run: EngineRun, call: training_pb2.LossCall, columns: Columns) -> list[str]:
    """Check a part of a batch, and keep it until the last one comes; returns warnings.

    Raises:
        OperationError: The part is invalid, or belongs to another batch than those before it.
    """
    parts = run.accumulator.parts or BatchParts()
    warnings = parts.hold(call, columns, run.policy)
    run.accumulator.parts = parts
    return warnings


@contextmanager
def head_added(run: EngineRun, step: Step) -> Iterator[None]:
    """Give the run the value head that its step needs, if it does; an error in the body takes it back."""
    if not step.adds_head:
        yield
        return
    run.add_value_head()
    try:
        yield
    except BaseException:
        run.drop_added_head()
        raise
