"""One forward and backward of a base model for several LoRA runs at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TypeVar, cast

import torch
from gradwire_losses.batch import Batch, sent
from torch import Tensor

from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.model.adapters.products import Span
from gradwire_server.engine.model.packing import Packing, arrange
from gradwire_server.engine.model.placement import total_norms
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.scoring.forward import Reading, assemble
from gradwire_server.engine.scoring.score_types import VOCABULARY_SCORES
from gradwire_server.engine.scoring.token_scores import TokenScores
from gradwire_server.engine.training.accumulation import GradientCollector, Key
from gradwire_server.engine.training.differentiable_scores import to_backward
from gradwire_server.engine.training.forward_backward import Training
from gradwire_server.engine.training.loss_report import LossEvaluation

T = TypeVar("T")


def can_go_together(policy: LoraPolicy, other: LoraPolicy) -> bool:
    """Whether two runs can share a forward in training mode with the same results as each alone."""
    adapters = policy.split_model.adapters
    return (
        policy.split_model is other.split_model
        and policy.adapter != other.adapter
        and policy.gradient_checkpointing == other.gradient_checkpointing
        and not (policy.has_dropout or other.has_dropout)
        and policy.split_model.routers is None  # whose figures are sums over one run's tokens
        and adapters is not None
        and all(adapters.computes_in_spans(each.adapter) for each in (policy, other))
    )


def hidden_together(
    policies: Sequence[LoraPolicy], batches: Sequence[Batch], positions: Sequence[Tensor]
) -> list[Tensor]:
    """Final hidden states of one batch per run, from one forward of the trunk in training mode.

    Args:
        policies: Policies that satisfy :func:`can_go_together`.
        batches: Their batches, each with at least one sequence.
        positions: ``[P]`` for each batch: indices into its tokens.

    Returns:
        ``[P, H]`` for each batch, as from ``policy.hidden``.
    """
    first = policies[0]
    split_model = first.split_model
    lengths = torch.cat([batch.lengths for batch in batches])
    arranged = arrange(
        first.packing(training=True),
        torch.cat([batch.input_ids for batch in batches]),
        lengths,
        torch.cat([batch.group_sizes for batch in batches]),
    )
    begins, total = [], 0
    for batch in batches:
        begins.append(total)
        total += len(batch.input_ids)
    # A batch's first token is never shared with another batch, so its place is the start of the run's tokens.
    starts = arranged.places[begins].tolist()
    stops = [*starts[1:], arranged.input_ids.numel()]
    spans = [Span(policy.adapter, *ends) for policy, ends in zip(policies, zip(starts, stops), strict=True)]
    split_model.activate_spans(spans, training=True, checkpointing=first.gradient_checkpointing)
    states = split_model.states(arranged)
    wanted = arranged.places[torch.cat([own + begin for own, begin in zip(positions, begins, strict=True)])]
    found = states.index_select(0, sent(wanted, states.device))
    return list(found.split([len(own) for own in positions]))


def can_join(training: Training) -> bool:
    """Whether a training is one micro-batch with scored tokens; batches with images are computed alone."""
    return len(training.micros) == 1 and training.batch.images is None and len(_reading(training).positions) > 0


def fits(trainings: Sequence[Training], most_tokens: int) -> bool:
    """Whether trainings that satisfy :func:`can_join` compute at most ``most_tokens`` together."""
    micros = [training.micros[0] for training in trainings]
    if trainings[0].policy.packing(training=True) is not Packing.PADDED:
        return sum(micro.computed_tokens for micro in micros) <= most_tokens
    width = max(int(micro.batch.lengths.max()) for micro in micros)
    return sum(micro.batch.num_sequences for micro in micros) * width <= most_tokens


def forward_backward_together(
    trainings: Sequence[Training], run_rngs: Sequence[Callable[[], AbstractContextManager[None]]]
) -> list[LossEvaluation | None]:
    """Run :func:`.forward_backward.forward_backward` for several runs with a shared forward and backward of the trunk.

    Args:
        trainings: Trainings that satisfy :func:`can_join`, of policies that satisfy :func:`can_go_together`.
        run_rngs: For each run, makes the context in which its loss draws random numbers.

    Returns:
        For each run its evaluation, or None if it failed: nothing of it is accumulated, and repeating it alone gives
        its error.

    Raises:
        Exception: Any error in the shared computation; nothing is accumulated then.
    """
    passes: list[list[tuple[Key, list[Tensor], list[Tensor]]]] = []
    evaluated = []
    for training, scores, run_rng in zip(trainings, _scores_together(trainings), run_rngs, strict=True):
        detached = assemble(
            training.policy,
            training.batch,
            training.micros,
            [{name: values.detach() for name, values in scores.items()}],
            training.names,
        )
        with run_rng():
            gradients = _unless_failed(partial(training.evaluate, training.parts()[0], detached))
        evaluated.append(gradients is not None)
        passes.append([(key, *to_backward(scores, by_name)) for key, by_name in (gradients or {}).items()])
    with ExitStack() as stack:
        collectors = [
            stack.enter_context(GradientCollector(training.policy.trainable_parameters())) for training in trainings
        ]
        _backward(collectors, passes)
    found: list[LossEvaluation | None] = []
    norms = total_norms([collector.gradients for collector in collectors])
    for training, collector, norm, whole in zip(trainings, collectors, norms, evaluated, strict=True):
        found.append(_unless_failed(partial(training.end, collector, 1, norm=norm)) if whole else None)
    return found


def _scores_together(trainings: Sequence[Training]) -> list[dict[str, Tensor]]:
    """Scores of each training's batch, from one forward of the trunk."""
    readings = [_reading(training) for training in trainings]

    def compute() -> list[dict[str, Tensor]]:
        taught = [reading.teacher_states() for reading in readings]
        policies = [cast(LoraPolicy, training.policy) for training in trainings]
        hidden = hidden_together(policies, [each.batch for each in trainings], [each.positions for each in readings])
        found = _token_scores_together(readings, hidden)
        return [
            reading.scores(states, teacher_states, training=True, found=scores)
            for reading, states, teacher_states, scores in zip(readings, hidden, taught, found, strict=True)
        ]

    for reading in readings:
        compute = partial(reading.with_weights, compute)
    return compute()


def _token_scores_together(readings: Sequence[Reading], hidden: Sequence[Tensor]) -> list[TokenScores | None]:
    """Token scores of the readings that want the same ones with the base's output head, by one product with it."""
    alike: dict[object, list[int]] = {}
    for number, reading in enumerate(readings):
        wanted = frozenset(reading.names) & VOCABULARY_SCORES
        if wanted and reading.policy.output_head().adapter is None:
            alike.setdefault((wanted, reading.temperature, reading.ids.shape[1]), []).append(number)
    found: list[TokenScores | None] = [None] * len(readings)
    for numbers in alike.values():
        if len(numbers) == 1:
            continue
        members = [readings[number] for number in numbers]
        states = torch.cat([readings[number].read_states(hidden[number]) for number in numbers])
        whole = members[0].token_scores(states, torch.cat([each.ids for each in members]), training=True)
        parts = whole.split([len(each.ids) for each in members])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part
    return found


def _backward(
    collectors: Sequence[GradientCollector], passes: Sequence[Sequence[tuple[Key, list[Tensor], list[Tensor]]]]
) -> None:
    """Run one backward pass for the first unit of every loss, another for their second units, and so on."""
    count = max(map(len, passes))
    for index in range(count):
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for collector, parts in zip(collectors, passes, strict=True):
            if index < len(parts):
                key, own_outputs, own_gradients = parts[index]
                collector.collect(key)
                outputs += own_outputs
                gradients += own_gradients
        if outputs:
            torch.autograd.backward(outputs, gradients, retain_graph=index + 1 < count)


def _reading(training: Training) -> Reading:
    return Reading(
        training.policy, training.batch, training.names, training.temperature, training.teacher, training.budget
    )


def _unless_failed(attempt: Callable[[], T]) -> T | None:
    try:
        return attempt()
    except Exception as error:  # whatever a loss raises, the other runs go on
        if is_fatal(error):
            raise
        return None
