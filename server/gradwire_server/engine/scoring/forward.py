"""Scores of a batch under a policy, micro-batch by micro-batch. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar, cast

import torch
from gradwire_losses.batch import Batch, beside, sent
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.executor import Scored, Turn, executor_of
from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.layers.routers import ROUTER_SCORES
from gradwire_server.engine.model.packing import Layout, Padded
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.model.shared_forward import hidden_together
from gradwire_server.engine.scoring.divergence import score_divergence
from gradwire_server.engine.scoring.planner import Budget, MicroBatch, split_for_scores
from gradwire_server.engine.scoring.score_types import (
    HEAD_OF_SCORE,
    OWN_SCORES,
    SEQUENCE_SCORES,
    VOCABULARY_SCORES,
    Teacher,
    check_candidates,
    check_scores,
    entries_of,
    score_dtype,
    score_shape,
)
from gradwire_server.engine.scoring.token_scores import TokenScores, score_tokens
from gradwire_server.engine.threads import suited_threads

T = TypeVar("T")


READ_SCORES = VOCABULARY_SCORES | {"values", "divergence"}
"""Scores that are read before a token is scored."""


class Alike(NamedTuple):
    """The scored tokens that are the same prediction after the same tokens.

    Attributes:
        first: ``[D]`` the first scored token of each distinct one.
        among: ``[T]`` the distinct one that each scored token is.
    """

    first: Tensor
    among: Tensor


@dataclass(frozen=True, eq=False)
class Scoring:
    """The scores wanted of a batch, and the positions of its hidden states that they are read at.

    :data:`.routers.ROUTER_SCORES` among the names are sums over all of its tokens. With ``alike``, :data:`READ_SCORES`
    are computed for distinct tokens only.
    """

    policy: Policy
    batch: Batch
    names: Collection[str]
    temperature: float
    teacher: Teacher | None
    budget: Budget
    alike: Alike | None = None

    @cached_property
    def places(self) -> dict[str, Tensor]:
        """Positions of tokens: before each scored token, of the scored token, and the last of each sequence."""
        wanted, batch, nowhere = set(self.names), self.batch, torch.empty(0, dtype=torch.int64)
        return {
            "read": self._of_distinct(batch.read_positions) if wanted & READ_SCORES else nowhere,
            "own": batch.own_positions if wanted & OWN_SCORES else nowhere,
            "last": batch.lengths.cumsum(0) - 1 if wanted & SEQUENCE_SCORES else nowhere,
        }

    @cached_property
    def positions(self) -> Tensor:
        """``[P]`` all positions."""
        return torch.cat(list(self.places.values()))

    def with_weights(self, computation: Callable[[], T]) -> T:
        """Run a computation that calls :meth:`scores`, with the weights of the policy and of the teacher at hand."""
        if self.teacher is None:
            return self.policy.compute(computation)
        teacher = self.teacher.policy
        return teacher.compute(lambda: self.policy.compute(computation))

    def teacher_states(self) -> Tensor | None:
        """The teacher's hidden states; None without ``divergence``.

        Call it before the student's forward, because the student's weights must be the active ones in its backward.
        """
        if self.teacher is None or "divergence" not in self.names:
            return None
        batch = self.batch
        with torch.no_grad():
            return self.teacher.policy.hidden(
                batch.input_ids,
                batch.lengths,
                self.places["read"],
                sharing=torch.tensor([batch.num_sequences]),
                images=batch.images,
            )

    @cached_property
    def ids(self) -> Tensor:
        """``[T, K]`` the ids that are scored in each place that is read."""
        ids = self._of_distinct(self.batch.targets[:, None])
        return torch.cat([ids, self.batch["candidates"]], dim=1) if "candidate_logprobs" in self.names else ids

    def arranged(self, *, training: bool) -> tuple[Scoring, Layout | Padded]:
        """The sequences as they go through the policy, and the scoring of what differs where prefixes are shared.

        The same prediction after the same tokens has the same scores, so the output head is evaluated once for it.
        """
        batch = self.batch
        arranged = self.policy.arranged(
            batch.input_ids,
            batch.lengths,
            sharing=torch.tensor([batch.num_sequences]),
            training=training,
            images=batch.images,
        )
        if isinstance(arranged, Padded) or len(arranged.input_ids) == len(batch.input_ids):
            return self, arranged
        if not READ_SCORES.intersection(self.names) or "candidate_logprobs" in self.names:
            return self, arranged
        predictions = arranged.places[batch.read_positions] * self.policy.facts.vocab_size + batch.targets
        distinct, among = predictions.unique(return_inverse=True)
        if len(distinct) == len(predictions):
            return self, arranged
        first = torch.full_like(distinct, len(predictions))
        first.scatter_reduce_(0, among, torch.arange(len(predictions)), "amin")
        return replace(self, alike=Alike(first, among)), arranged

    def _of_distinct(self, of_scored: Tensor) -> Tensor:
        return of_scored if self.alike is None else of_scored[self.alike.first]

    def read_states(self, hidden: Tensor) -> Tensor:
        """``[T, H]`` the hidden states before scored tokens, of those at :attr:`positions`."""
        return hidden[: len(self.places["read"])]

    def token_scores(self, states: Tensor, ids: Tensor, *, training: bool = False) -> TokenScores:
        """Compute the scores of ids given states ``[T, H]``, which may be of several batches."""
        wanted = set(self.names)
        return score_tokens(
            states,
            self.policy.output_head(training=training),
            sent(ids, states.device),
            temperature=self.temperature,
            entropy="entropy" in wanted,
            mean_logprobs="mean_logprobs" in wanted,
            collision="collision" in wanted,
            correct="correct" in wanted,
            chunk_elements=self.budget.logits_elements,
            kept_elements=self.budget.kept_logits,
        )

    def scores(
        self,
        hidden: Tensor,
        teacher_states: Tensor | None,
        *,
        training: bool = False,
        token_scores: TokenScores | None = None,
    ) -> dict[str, Tensor]:
        """Compute the scores from the policy's hidden states at :attr:`positions` and the teacher's.

        Call it within :meth:`with_weights`. With ``training`` an adapter on the output head applies its dropout.

        Args:
            token_scores: The result of :meth:`token_scores` for this batch, where it is known already.
        """
        wanted = set(self.names)
        read, own, last = hidden.split([len(positions) for positions in self.places.values()])
        scores: dict[str, Tensor] = {}
        if wanted & VOCABULARY_SCORES:
            token_scores = token_scores or self.token_scores(read, self.ids, training=training)
            scores = {
                "logprobs": token_scores.logprobs[:, 0],
                "candidate_logprobs": token_scores.logprobs[:, 1:],
                "entropy": token_scores.entropy,
                "mean_logprobs": token_scores.mean_logprobs,
                "collision": token_scores.collision,
                "correct": token_scores.correct,
            }
        if self.teacher is not None and teacher_states is not None:
            scores["divergence"] = score_divergence(
                read,
                self.policy.output_head(training=training),
                teacher_states.to(hidden.device),
                self.teacher.policy.output_head(),
                beta=self.teacher.beta,
                temperature=self.temperature,
                chunk_elements=self.budget.logits_elements,
            )
        if self.policy.head is not None:
            for name in wanted & set(HEAD_OF_SCORE):
                scores[name] = self.policy.head(
                    last if name in SEQUENCE_SCORES else own if name in OWN_SCORES else read
                )
        if self.alike is not None:
            among = sent(self.alike.among, hidden.device)
            scores |= {
                name: scores[name].index_select(0, among) for name in scores.keys() & READ_SCORES if len(scores[name])
            }
        return {name: scores[name] for name in self.names if name not in ROUTER_SCORES}


def score_batch(scoring: Scoring, agreement: Agreement | None = None) -> dict[str, Tensor]:
    """Compute scores without gradients, in evaluation mode; each process of the engine computes some micro-batches.

    Args:
        agreement: This process's agreement with the others; by default it is alone.

    Returns:
        Score name -> ``[T, ...]`` or (:data:`SEQUENCE_SCORES`) ``[S, ...]``.

    Raises:
        OperationError: As :func:`check_scores`, or as :func:`check_candidates`.
    """
    policy, batch, names, budget = scoring.policy, scoring.batch, scoring.names, scoring.budget
    check_scores(policy, names, scoring.teacher)
    check_candidates(batch, names)
    micros = split_for_scores(policy, batch, budget)

    def compute(turn: Turn) -> Scored:
        return compute_scores([replace(scoring, batch=micros[turn.number].batch)], training=False)

    with torch.no_grad():
        parts = executor_of(budget.lanes, agreement).score("scores", len(micros), compute)
    return assemble(policy, batch, micros, [scores for (scores,) in parts], names)


def compute_scores(
    scorings: Sequence[Scoring], *, training: bool, activations: Activations = Activations.KEEP
) -> list[dict[str, Tensor]]:
    """Compute the scores of each scoring from one forward of the trunk, on the policy's device.

    Args:
        scorings: One, or several with positions and without images, of policies that satisfy
            :func:`.shared_forward.can_go_together`, in training mode.
        activations: How activations are handled in training mode.
    """
    first, device = scorings[0], scorings[0].policy.device
    routers: dict[str, Tensor] | None = {} if ROUTER_SCORES & set(first.names) else None
    divided = first.policy.split_model.placement.parts > 1  # other processes need this one's part of the layers
    if not len(first.positions) and routers is None and not divided:
        shapes = {name: score_shape(first.policy, first.batch, name) for name in first.names}
        return [{name: torch.zeros(shape, dtype=score_dtype(name), device=device) for name, shape in shapes.items()}]

    arranged: Layout | Padded | None = None
    if len(scorings) == 1:
        first, arranged = first.arranged(training=training)
        scorings = [first]

    def compute() -> list[dict[str, Tensor]]:
        taught = [scoring.teacher_states() for scoring in scorings]
        between_micro_batches()
        hidden = _hidden(scorings, arranged, training, activations, routers)
        shared = _shared_token_scores(scorings, hidden)
        return [
            scoring.scores(states, teacher_states, training=training, token_scores=found) | (routers or {})
            for scoring, states, teacher_states, found in zip(scorings, hidden, taught, shared, strict=True)
        ]

    for scoring in scorings:
        compute = partial(scoring.with_weights, compute)
    with suited_threads(device, sum(len(each.batch.input_ids) for each in scorings), max(map(_sizes, scorings))):
        return compute()


def _sizes(scoring: Scoring) -> int:
    """Number of parameters that a scoring's tokens go through."""
    teacher = scoring.teacher
    return scoring.policy.facts.num_parameters + (teacher.policy.facts.num_parameters if teacher is not None else 0)


def _hidden(
    scorings: Sequence[Scoring],
    arranged: Layout | Padded | None,
    training: bool,
    activations: Activations,
    routers: dict[str, Tensor] | None,
) -> Sequence[Tensor]:
    """Final hidden states at the positions of each scoring, from one forward of the trunk."""
    if len(scorings) > 1:
        policies = [cast(LoraPolicy, scoring.policy) for scoring in scorings]
        return hidden_together(policies, [each.batch for each in scorings], [each.positions for each in scorings])
    (scoring,) = scorings
    states = scoring.policy.hidden(
        scoring.batch.input_ids,
        scoring.batch.lengths,
        scoring.positions,
        training=training,
        activations=activations,
        router_sums=routers,
        images=scoring.batch.images,
        arranged=arranged,
    )
    return [states]


def _shared_token_scores(scorings: Sequence[Scoring], hidden: Sequence[Tensor]) -> list[TokenScores | None]:
    """Token scores of the scorings that want the same ones with the base's output head, by one product with it.

    Returns:
        For each scoring its scores; None if it shares the product with no other.
    """
    alike: dict[object, list[int]] = {}
    for number, scoring in enumerate(scorings):
        wanted = frozenset(scoring.names) & VOCABULARY_SCORES
        if len(scorings) > 1 and wanted and scoring.policy.output_head().adapter is None:
            alike.setdefault((wanted, scoring.temperature, scoring.ids.shape[1]), []).append(number)
    of_scorings: list[TokenScores | None] = [None] * len(scorings)
    for numbers in alike.values():
        if len(numbers) == 1:
            continue
        members = [scorings[number] for number in numbers]
        states = torch.cat([scorings[number].read_states(hidden[number]) for number in numbers])
        whole = members[0].token_scores(states, torch.cat([each.ids for each in members]), training=True)
        for number, part in zip(numbers, whole.split([len(each.ids) for each in members]), strict=True):
            of_scorings[number] = part
    return of_scorings


def assemble(
    policy: Policy,
    batch: Batch,
    micros: Sequence[MicroBatch],
    parts: Sequence[Mapping[str, Tensor]],
    names: Collection[str],
) -> dict[str, Tensor]:
    """Combine the scores of micro-batches in the order of the whole batch."""
    if len(micros) == 1 and micros[0].batch is batch:
        return {name: parts[0][name].to(policy.device, score_dtype(name)) for name in names}
    whole: dict[str, Tensor] = {}
    for name in names:
        all_of_it = torch.zeros(score_shape(policy, batch, name), dtype=score_dtype(name), device=policy.device)
        for micro, part in zip(micros, parts, strict=True):
            all_of_it[beside(entries_of(micro, name), all_of_it)] = part[name].to(policy.device, all_of_it.dtype)
        whole[name] = all_of_it
    return whole
