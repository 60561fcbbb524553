"""Scores in training mode, with their backward pass into the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from gradwire_losses.batch import Batch, beside
from torch import Tensor

from gradwire_server.engine.executor import Executor, Scored, Turn
from gradwire_server.engine.generators import generator_states, preserved_rng, set_generator_states
from gradwire_server.engine.lanes import Key
from gradwire_server.engine.model.layers.dropout import seeded
from gradwire_server.engine.model.layers.routers import ROUTER_SCORES, RouterSums
from gradwire_server.engine.scoring.forward import Scoring, assemble, compute_scores
from gradwire_server.engine.scoring.memory import ActivationMeter
from gradwire_server.engine.scoring.planner import MicroBatch
from gradwire_server.engine.scoring.score_types import entries_of
from gradwire_server.engine.threads import suited_threads
from gradwire_server.engine.training.accumulation import GradientCollector


class DifferentiableScores:
    """Scores in training mode, with their backward pass into the weights, of one batch or of several runs' batches.

    The first micro-batches of all batches go through the model together, then the second, and so on. Graphs are kept
    while their measured saved activations fit the budget. The others are computed without a graph, and again, from the
    same state of the random generators, in the backward pass. A policy with dropout computes each example alone, with
    masks that depend only on its row and the seed, so the scores do not depend on how the batch is split.

    Args:
        scorings: The scores wanted of each batch, or of one that it is a part of; several as for
            :func:`.forward.compute_scores`.
        parts: The micro-batches of each, as many of each: those of the whole batch, or one that is scored alone.
        keep_single: Keep the graph of a batch with one micro-batch, whatever its size. Use it if the gradient follows
            at once, because recomputing would need as much memory.
        dropout_seed: Identifies the run and operation; used if the policy has dropout.
        executor: Computes the micro-batches; by default this process alone.

    Attributes:
        by_name: For each batch: score name -> ``[T]`` or ``[S]``, detached.
        routers: Decisions of the routers of a mixture of experts; None for another model, or several batches.
        by_micro: For each micro-batch its scores for each batch.
        num_microbatches: Number of forwards, without repeated ones.
        recomputed: Whether any micro-batch is computed twice.
        activations: Number of micro-batches by what becomes of their activations.
    """

    def __init__(
        self,
        scorings: Sequence[Scoring],
        parts: Sequence[Sequence[MicroBatch]],
        *,
        keep_single: bool = False,
        dropout_seed: str = "",
        executor: Executor | None = None,
    ) -> None:
        self.scorings = scorings
        self.executor = executor or Executor()
        self._parts, self._dropout_seed = parts, dropout_seed
        self._micros = list(zip(*parts, strict=True))
        self.num_microbatches = len(self._micros)
        self._unmeasured = keep_single and self.num_microbatches == 1
        self._graphs: list[list[dict[str, Tensor]] | None] = []  # of each turn
        self._rng: list[dict[str, Tensor]] = []
        self._kept_bytes, self._bytes_per_token = 0, 0.0
        self.by_micro = self.executor.score("scores", self.num_microbatches, self._forward)
        twice, self.recomputed = self.executor.recomputed([graph is None for graph in self._graphs])
        self._graphs = [None if again else graph for graph, again in zip(self._graphs, twice, strict=True)]
        self.by_name, self.routers = combined(scorings, parts, self.by_micro)

    @property
    def activations(self) -> Counter[str]:
        return Counter(micro.activations.label for part in self._parts for micro in part)

    def _forward(self, turn: Turn) -> Scored:
        """Compute a micro-batch's scores, detached, and keep its graph if it fits."""
        policy, budget = self.scorings[0].policy, self.scorings[0].budget.activation_bytes
        micros = self._micros[turn.number]
        tokens = sum(micro.computed_tokens for micro in micros)
        self._rng.append({} if self._unmeasured else generator_states())  # for a second forward
        keep = self._unmeasured or self._kept_bytes + self._bytes_per_token * tokens <= budget
        if self._unmeasured:
            scores = self._score(micros)
        elif keep:
            meter = ActivationMeter(policy)
            with meter:
                scores = self._score(micros)
            self._bytes_per_token = max(self._bytes_per_token, meter.bytes / max(1, tokens))
            keep = self._kept_bytes + meter.bytes <= budget
            self._kept_bytes += meter.bytes if keep else 0
        else:
            with torch.no_grad():
                scores = self._score(micros)
        self._graphs.append(scores if keep else None)
        return [{name: values.detach() for name, values in own.items()} for own in scores]

    def _score(self, micros: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        scorings = [
            own if own.batch is micro.batch else replace(own, batch=micro.batch)
            for own, micro in zip(self.scorings, micros, strict=True)
        ]
        policy, activations = scorings[0].policy, micros[0].activations
        if policy.split_model.routers is not None:
            scorings = [replace(own, names=ROUTER_SCORES.union(own.names)) for own in scorings]
        if not policy.has_dropout:
            return compute_scores(scorings, training=True, activations=activations)
        with seeded(self._dropout_seed, int(micros[0].examples[0])):
            return compute_scores(scorings, training=True, activations=activations)

    def backward(
        self,
        collectors: Sequence[GradientCollector],
        gradients: Sequence[Mapping[Key, Mapping[str, Tensor]]],
        *,
        lane: int = 0,
        repeated: bool = False,
    ) -> None:
        """Collect each key's gradient in the weights, of this process's micro-batches; can be called once only.

        Args:
            collectors: The collector of each batch's run.
            gradients: For each batch: key -> its gradients in the scores, and in :data:`.routers.PROBABILITIES`; a key
                of another process only has none.
            lane: That of the first micro-batch.
            repeated: The gradient does not count, as of a :class:`.executor.Turn`.
        """
        split_model = self.scorings[0].policy.split_model
        split_model.expect_images(of_some=self.scorings[0].batch.images is not None)

        def go_back(place: int, turn: Turn) -> None:
            own_lane = lane + turn.number % self.executor.lanes
            try:
                self._backward(collectors, gradients, place, turn, own_lane, counts=not (repeated or turn.repeated))
            except Exception:
                split_model.recover()
                raise

        self.executor.backward(self.num_microbatches, go_back)

    def _backward(
        self,
        collectors: Sequence[GradientCollector],
        gradients: Sequence[Mapping[Key, Mapping[str, Tensor]]],
        place: int,
        turn: Turn,
        lane: int,
        *,
        counts: bool,
    ) -> None:
        policy, micros = self.scorings[0].policy, self._micros[turn.number]
        scores, self._graphs[place] = self._graphs[place], None
        if scores is None:
            with preserved_rng():
                set_generator_states(self._rng[place])
                scores = self._score(micros)
        if len(micros) == 1:  # the spans of several are still active
            policy.activate(training=True, activations=micros[0].activations)
        passes = [
            _passes(
                batch_of(scoring, part),
                micro,
                computed,
                own,
                counts=counts and collector.counts,
                in_step=self.executor.in_step,
                divided=collector.divided,
            )
            for scoring, part, collector, micro, computed, own in zip(
                self.scorings, self._parts, collectors, micros, scores, gradients, strict=True
            )
        ]
        count = max(map(len, passes))
        tokens = sum(len(micro.batch.input_ids) for micro in micros)
        with suited_threads(policy.device, tokens, policy.facts.num_parameters):
            for number in range(count):  # the first key of each batch, then the second
                outputs: list[Tensor] = []
                in_outputs: list[Tensor] = []
                for collector, own in zip(collectors, passes, strict=True):
                    if number < len(own):
                        if own[number].counts:
                            collector.collect(own[number].key, lane)
                        else:
                            collector.drop()
                        outputs += own[number].outputs
                        in_outputs += own[number].gradients
                torch.autograd.backward(outputs, in_outputs, retain_graph=number + 1 < count)


def batch_of(scoring: Scoring, part: Sequence[MicroBatch]) -> Batch:
    """The batch that these micro-batches make up: that of one of them, or the whole."""
    return part[0].batch if len(part) == 1 else scoring.batch


def combined(
    scorings: Sequence[Scoring], parts: Sequence[Sequence[MicroBatch]], by_micro: Sequence[Scored]
) -> tuple[list[dict[str, Tensor]], RouterSums | None]:
    """Each batch's scores, of those of all micro-batches, and what the routers of a mixture of experts decided.

    Args:
        scorings, parts: See :class:`DifferentiableScores`.
        by_micro: For each micro-batch the scores of each batch.
    """
    by_name = [
        assemble(scoring.policy, batch_of(scoring, part), part, [scored[number] for scored in by_micro], scoring.names)
        for number, (scoring, part) in enumerate(zip(scorings, parts, strict=True))
    ]
    if not by_micro or scorings[0].policy.split_model.routers is None:
        return by_name, None
    return by_name, RouterSums.of([scores for (scores,) in by_micro], len(batch_of(scorings[0], parts[0]).input_ids))


@dataclass(frozen=True, eq=False)
class _Pass:
    """One key's arguments for autograd: scores that depend on weights, and their gradients.

    Attributes:
        counts: Whether the gradients in the weights are kept.
    """

    key: Key
    counts: bool
    outputs: list[Tensor]
    gradients: list[Tensor]


def _passes(
    batch: Batch,
    micro: MicroBatch,
    scores: Mapping[str, Tensor],
    gradients: Mapping[Key, Mapping[str, Tensor]],
    *,
    counts: bool,
    in_step: bool,
    divided: bool,
) -> list[_Pass]:
    """The passes back through a micro-batch's graph, from the gradients in the whole batch's scores.

    In step with other processes each key has a pass, if need be with gradients of 0; over divided weights through the
    same scores in all of them.
    """
    passes = []
    for key, by_name in gradients.items():
        own = [name for name in by_name if counts and scores[name].requires_grad and scores[name].numel()]
        names = own
        if divided or (in_step and not own):
            names = [name for name, score in scores.items() if score.requires_grad]
        if names:
            in_scores = [
                _part(batch, micro, name, by_name[name]).to(scores[name].device, scores[name].dtype, non_blocking=True)
                if name in own
                else torch.zeros_like(scores[name])
                for name in names
            ]
            passes.append(_Pass(key, divided or bool(own), [scores[name] for name in names], in_scores))
    return passes


def _part(batch: Batch, micro: MicroBatch, name: str, whole: Tensor) -> Tensor:
    """Select a micro-batch's entries from those of the whole batch; those of routers are of all its tokens."""
    if micro.batch is batch or name in ROUTER_SCORES:
        return whole
    return whole[beside(entries_of(micro, name), whole)]
