"""Scores of a batch in training mode, with their backward pass into the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from gradwire_losses.batch import Batch, beside
from torch import Tensor

from gradwire_server.engine.generators import generator_states, preserved_rng, set_generator_states
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.layers.dropout import seed_generators
from gradwire_server.engine.model.layers.routers import PROBABILITIES, ROUTER_SCORES, RouterSums
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.forward import Reading, assemble
from gradwire_server.engine.scoring.memory import ActivationMeter
from gradwire_server.engine.scoring.planner import Budget, MicroBatch, split
from gradwire_server.engine.scoring.score_types import Teacher, check_candidates, check_scores, entries_of
from gradwire_server.engine.threads import suited_threads
from gradwire_server.engine.training.accumulation import GradientCollector, Key


class DifferentiableScores:
    """Scores of a batch in training mode, with their backward pass into the weights.

    Graphs of micro-batches are kept while their measured saved activations fit the budget. The others are computed
    without a graph, and again, from the same state of the random generators, in the backward pass. A policy with
    dropout computes each example alone, with masks that depend only on its row and the seed, so the scores do not
    depend on how the batch is split.

    Args:
        temperature: Divides the logits.
        teacher: The policy to compare with; required for the score ``divergence``.
        budget: Memory limits.
        micros: The batch's micro-batches; by default split by the budget.
        keep_single: Keep the graph of a batch with one micro-batch, whatever its size. Use it if the gradient follows
            at once, because recomputing would need as much memory.
        dropout_seed: Identifies the run and operation; used if the policy has dropout.
        rows: ``[b]`` rows in the caller's batch of these examples; None if they are the same.

    Attributes:
        by_name: Score name -> ``[T]`` or ``[S]``, detached.
        routers: What the routers of a mixture of experts decided; None for another model.
        recomputed: Whether any micro-batch is computed twice.
        activations: Number of micro-batches by what becomes of their activations.
    """

    def __init__(
        self,
        policy: Policy,
        batch: Batch,
        names: Collection[str],
        *,
        temperature: float = 1.0,
        teacher: Teacher | None = None,
        budget: Budget,
        micros: Sequence[MicroBatch] | None = None,
        keep_single: bool = False,
        dropout_seed: str = "",
        rows: Tensor | None = None,
    ) -> None:
        check_scores(policy, names, teacher, field="scores")
        check_candidates(batch, names)
        self.policy = policy
        self.batch = batch
        self.names = frozenset(names)
        self._temperature = temperature
        self._teacher = teacher
        self._budget = budget
        self._dropout_seed, self._rows = dropout_seed, rows
        self._micros = micros or training_micros(policy, batch, budget)
        self._graphs: list[dict[str, Tensor] | None] = []
        self._rng: list[dict[str, Tensor]] = []
        parts = self._forward(unmeasured=keep_single and len(self._micros) == 1)
        self.by_name = assemble(policy, batch, self._micros, parts, names)
        self.routers: RouterSums | None = None
        if parts and policy.split_model.routers is not None:
            self.routers = RouterSums.of(parts, len(batch.input_ids))
        self.recomputed = any(graph is None for graph in self._graphs)
        self.activations = counted(self._micros)

    @property
    def num_microbatches(self) -> int:
        return len(self._micros)

    def _forward(self, *, unmeasured: bool) -> list[dict[str, Tensor]]:
        budget, kept_bytes, bytes_per_token = self._budget.activation_bytes, 0, 0.0
        parts = []
        for micro in self._micros:
            self._rng.append({} if unmeasured else generator_states())  # for a second forward
            keep = unmeasured or kept_bytes + bytes_per_token * micro.computed_tokens <= budget
            if unmeasured:
                scores = self._score(micro)
            elif keep:
                meter = ActivationMeter(self.policy)
                with meter:
                    scores = self._score(micro)
                bytes_per_token = max(bytes_per_token, meter.bytes / max(1, micro.computed_tokens))
                keep = kept_bytes + meter.bytes <= budget
                kept_bytes += meter.bytes if keep else 0
            else:
                with torch.no_grad():
                    scores = self._score(micro)
            self._graphs.append(scores if keep else None)
            parts.append({name: values.detach() for name, values in scores.items()})
            del scores  # with its graph, before the next forward
        return parts

    def _score(self, micro: MicroBatch) -> dict[str, Tensor]:
        names = self.names if self.policy.split_model.routers is None else self.names | ROUTER_SCORES
        reading = Reading(self.policy, micro.batch, names, self._temperature, self._teacher, self._budget)
        if not self.policy.has_dropout:
            return reading.alone(training=True, activations=micro.activations)
        row = micro.examples[0] if self._rows is None else self._rows[micro.examples[0]]
        with preserved_rng():
            seed_generators(self._dropout_seed, int(row))
            return reading.alone(training=True, activations=micro.activations)

    def backward(
        self,
        collector: GradientCollector,
        gradients: Mapping[Key, Mapping[str, Tensor]],
        router_gradient: Tensor | None = None,
    ) -> None:
        """Collect each key's gradient in the weights, given its gradients in the scores; can be called once only.

        Args:
            router_gradient: ``[E]`` gradient in the routers' summed probabilities; it is collected with the first key.
        """
        for index, micro in enumerate(self._micros):
            scores, self._graphs[index] = self._graphs[index], None
            if scores is None:
                with preserved_rng():
                    set_generator_states(self._rng[index])
                    scores = self._score(micro)
            self.policy.activate(training=True, activations=micro.activations)
            parts = []
            for key, by_name in gradients.items():
                own = {name: _part(self.batch, micro, name, gradient) for name, gradient in by_name.items()}
                if router_gradient is not None and key == next(iter(gradients)):
                    own[PROBABILITIES] = router_gradient
                outputs, their_gradients = to_backward(scores, own)
                if outputs:
                    parts.append((key, outputs, their_gradients))
            with suited_threads(self.policy.device, len(micro.batch.input_ids), self.policy.facts.num_parameters):
                for number, (key, outputs, their_gradients) in enumerate(parts, start=1):
                    collector.backward(key, outputs, their_gradients, retain_graph=number < len(parts))


def training_micros(policy: Policy, batch: Batch, budget: Budget) -> list[MicroBatch]:
    """Split a batch into micro-batches for training mode; one example each if the policy has dropout."""
    most = 0 if policy.has_dropout else budget.microbatch_tokens
    micros = split(batch, most, policy.packing(training=True), image_cost=budget.image_cost)
    always = Activations.RECOMPUTE if policy.gradient_checkpointing else Activations.KEEP
    return [replace(micro, activations=always | budget.activations(micro.computed_tokens)) for micro in micros]


def counted(micros: Sequence[MicroBatch]) -> dict[str, int]:
    """Number of micro-batches by what becomes of their activations."""
    return Counter(micro.activations.label for micro in micros)


def to_backward(scores: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Scores that depend on weights, and their given gradients, as arguments for autograd."""
    outputs = [scores[name] for name in gradients if scores[name].requires_grad]
    given = [gradient for name, gradient in gradients.items() if scores[name].requires_grad]
    return outputs, [
        gradient.to(score.device, score.dtype, non_blocking=True)
        for score, gradient in zip(outputs, given, strict=True)
    ]


def _part(batch: Batch, micro: MicroBatch, name: str, whole: Tensor) -> Tensor:
    """Select a micro-batch's entries from those of the whole batch."""
    return whole if micro.batch is batch else whole[beside(entries_of(micro, name), whole)]
