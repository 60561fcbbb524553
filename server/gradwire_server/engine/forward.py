"""Scores of a batch under a policy, micro-batch by micro-batch, and the way back from them to the weights.

Legend: ``S`` sequences, ``T`` scored tokens. Scores come out flat, in the order of the batch, float32, on the policy's
device. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from gradwire_losses.batch import Batch, beside, sent
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.accumulate import GradientCollector, Key
from gradwire_server.engine.divergence import score_divergence
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import unless_out_of_memory
from gradwire_server.engine.host import generator_states, preserved_rng, set_generator_states
from gradwire_server.engine.packing import Packing
from gradwire_server.engine.planner import Budget, MicroBatch, divided, split
from gradwire_server.engine.policy import Policy
from gradwire_server.engine.scoring import score_tokens

logger = logging.getLogger(__name__)

T = TypeVar("T")

VOCABULARY_SCORES = frozenset({"logprobs", "entropy", "correct", "candidate_logprobs", "mean_logprobs", "collision"})
"""Those that need the logits."""
SEQUENCE_SCORES = frozenset({"rewards", "class_logits"})
"""Those that a sequence has one of, read at its last token."""
OWN_SCORES = frozenset({"token_rewards", "token_class_logits"})
"""Those that are read at a token itself."""
HEAD_OF_SCORE = {
    "values": "value",
    "token_rewards": "reward",
    "rewards": "reward",
    "class_logits": "classification",
    "token_class_logits": "classification",
}
SCORES = VOCABULARY_SCORES | {"divergence"} | set(HEAD_OF_SCORE)


@dataclass(frozen=True)
class Teacher:
    """What the score ``divergence`` is taken to.

    Attributes:
        policy: frozen, of the student's vocabulary.
        beta: which divergence: see :mod:`.divergence`.
    """

    policy: Policy
    beta: float


def check_scores(
    policy: Policy, names: Collection[str], teacher: Teacher | None = None, *, field: str = "outputs"
) -> None:
    """Checks that a policy can give these scores.

    Raises:
        OperationError: INVALID_ARGUMENT for a name that is none, or a teacher of another vocabulary; UNSUPPORTED where
            the run lacks the head, or there is no teacher.
    """
    for name in names:
        if name not in SCORES:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"there is no score {name!r}; there are: {', '.join(sorted(SCORES))}",
                field=field,
                rule=f"one of {', '.join(sorted(SCORES))}",
            )
        kind = HEAD_OF_SCORE.get(name)
        if kind and (policy.head is None or policy.head.kind != kind):
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"{name} need a {kind} head, and this run has none: create it with head={kind!r}",
                field="head",
                rule=f"head is {kind!r}",
            )
    if "divergence" not in names:
        return
    if teacher is None:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED, "divergence needs a loss that names a reference_model", field=field
        )
    mine, theirs = policy.facts, teacher.policy.facts
    if mine.vocab_size != theirs.vocab_size:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"{theirs.name!r} has a vocabulary of {theirs.vocab_size} tokens and {mine.name!r} of {mine.vocab_size}: "
            "their distributions cannot be compared",
            field="reference_model",
            rule="the same vocabulary",
        )


def check_candidates(batch: Batch, names: Collection[str]) -> None:
    if "candidate_logprobs" in names and "candidates" not in batch.fields:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_BATCH,
            "candidate_logprobs are those of the batch's candidates [rows, tokens, candidates], which it has not",
            field="candidates",
            rule="given for candidate_logprobs",
        )


def score_batch(
    policy: Policy,
    batch: Batch,
    names: Collection[str],
    *,
    temperature: float = 1.0,
    teacher: Teacher | None = None,
    budget: Budget,
) -> dict[str, Tensor]:
    """Scores without gradients, in evaluation mode: name -> ``[T, ...]`` or (:data:`SEQUENCE_SCORES`) ``[S, ...]``.

    Raises:
        OperationError: as :func:`check_scores`.
    """
    check_scores(policy, names, teacher)
    check_candidates(batch, names)
    micros = split(batch, budget.microbatch_tokens, policy.packing())

    def compute(micro: MicroBatch) -> dict[str, Tensor]:
        with torch.no_grad():
            return Reading(policy, micro.batch, names, temperature, teacher, budget).alone(training=False)

    found = list(in_pieces(micros, compute, policy.packing()))
    return assemble(policy, batch, [micro for micro, _ in found], [scores for _, scores in found], names)


def in_pieces(
    micros: Sequence[MicroBatch],
    compute: Callable[[MicroBatch], T],
    packing: Packing,
    make_room: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[MicroBatch, T]]:
    """Each micro-batch and what was computed of it. One that memory does not suffice for is divided, as are those
    that follow it; what was computed before stays.

    Args:
        compute: leaves everything as it was where it raises.
        make_room: gives something up, once memory has run out, and says whether there was something.
    """
    waiting = deque(micros)
    while waiting:
        micro = waiting.popleft()
        found = unless_out_of_memory(partial(compute, micro), alone=len(micro.examples) == 1)
        if found is not None:
            yield micro, found
            del found  # a graph that is given up meanwhile is to be free
        elif make_room():
            waiting.appendleft(micro)
        else:
            tokens = micro.computed_tokens // 2
            logger.warning("out of memory: going on with micro-batches of %d tokens", tokens)
            waiting = deque(part for each in (micro, *waiting) for part in divided(each, tokens, packing))


class KeptScores:
    """Scores of a batch in training mode, with the way back to the weights.

    The graphs of micro-batches are kept while their saved activations, which are measured, fit the budget. The rest
    is computed without a graph, and once more, from the same state of the random generators, when the gradient
    comes.

    Args:
        micros: the batch's micro-batches; by default as the budget splits it.
        keep_single: keep the graph of a batch that is one micro-batch whatever its size: right where the gradient
            follows at once, since computing it again would need as much memory.

    Attributes:
        by_name: name -> ``[T]`` or ``[S]``, detached.
        recomputed: whether anything has to be computed twice.
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
    ) -> None:
        check_scores(policy, names, teacher, field="scores")
        check_candidates(batch, names)
        self.policy = policy
        self.batch = batch
        self.names = frozenset(names)
        self._temperature = temperature
        self._teacher = teacher
        self._budget = budget
        planned = micros or split(batch, budget.microbatch_tokens, policy.packing(training=True))
        self._micros: list[MicroBatch] = []
        self._graphs: list[dict[str, Tensor] | None] = []
        self._rng: list[dict[str, Tensor]] = []
        parts = self._forward(planned, unmeasured=keep_single and len(planned) == 1)
        self.by_name = assemble(policy, batch, self._micros, parts, names)
        self.recomputed = any(graph is None for graph in self._graphs)

    @property
    def num_microbatches(self) -> int:
        return len(self._micros)

    @property
    def largest_microbatch(self) -> int:
        """In tokens computed."""
        return max(micro.computed_tokens for micro in self._micros)

    def _forward(self, planned: Sequence[MicroBatch], *, unmeasured: bool) -> list[dict[str, Tensor]]:
        budget, kept_bytes, bytes_per_token = self._budget.activation_bytes, 0, 0.0

        def compute(micro: MicroBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
            nonlocal kept_bytes, bytes_per_token
            states = generator_states()
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
            return states, scores, keep

        def give_graphs_up() -> bool:
            nonlocal budget, unmeasured
            held, budget, unmeasured = any(graph is not None for graph in self._graphs), -1, False
            self._graphs = [None] * len(self._graphs)
            return held

        parts = []
        for micro, (states, scores, keep) in in_pieces(
            planned, compute, self.policy.packing(training=True), give_graphs_up
        ):
            self._micros.append(micro)
            self._rng.append(states)
            self._graphs.append(scores if keep else None)
            parts.append({name: values.detach() for name, values in scores.items()})
            del scores
        return parts

    def _score(self, micro: MicroBatch) -> dict[str, Tensor]:
        reading = Reading(self.policy, micro.batch, self.names, self._temperature, self._teacher, self._budget)
        return reading.alone(training=True)

    def backward(self, collector: GradientCollector, gradients: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Collects, for each key, the weights' gradient given that of the scores (shaped as they are). Once only."""
        for index, micro in enumerate(self._micros):
            scores, self._graphs[index] = self._graphs[index], None
            if scores is None:
                with preserved_rng():
                    set_generator_states(self._rng[index])
                    scores = self._score(micro)
            self.policy.activate(training=True)
            parts = []
            for key, by_name in gradients.items():
                own = {name: _part(self.batch, micro, name, gradient) for name, gradient in by_name.items()}
                outputs, their_gradients = to_backward(scores, own)
                if outputs:
                    parts.append((key, outputs, their_gradients))
            for number, (key, outputs, their_gradients) in enumerate(parts, start=1):
                collector.backward(key, outputs, their_gradients, retain_graph=number < len(parts))


def to_backward(scores: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those of the scores that weights had a part in, and the gradients given for them, as autograd takes them."""
    outputs = [scores[name] for name in gradients if scores[name].requires_grad]
    given = [gradient for name, gradient in gradients.items() if scores[name].requires_grad]
    return outputs, [
        gradient.to(score.device, score.dtype, non_blocking=True)
        for score, gradient in zip(outputs, given, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Reading:
    """Which scores of one micro-batch are wanted, and where in its hidden states they are read."""

    policy: Policy
    batch: Batch
    names: Collection[str]
    temperature: float
    teacher: Teacher | None
    budget: Budget

    @cached_property
    def places(self) -> dict[str, Tensor]:
        """Positions in the batch's tokens: where the next token is told, those of tokens themselves, last ones."""
        wanted, batch, nowhere = set(self.names), self.batch, torch.empty(0, dtype=torch.int64)
        return {
            "read": batch.read_positions if wanted & (VOCABULARY_SCORES | {"values", "divergence"}) else nowhere,
            "own": batch.own_positions if wanted & OWN_SCORES else nowhere,
            "last": batch.lengths.cumsum(0) - 1 if wanted & SEQUENCE_SCORES else nowhere,
        }

    @cached_property
    def positions(self) -> Tensor:
        """``[P]`` all of them."""
        return torch.cat(list(self.places.values()))

    def alone(self, *, training: bool) -> dict[str, Tensor]:
        """The scores, in one forward of the trunk, on the policy's device."""
        if not len(self.positions):
            device = self.policy.device
            return {
                name: torch.zeros(_shape(self.policy, self.batch, name), dtype=_dtype(name), device=device)
                for name in self.names
            }
        batch, teacher_states = self.batch, self.teacher_states()
        hidden = self.policy.hidden(
            batch.input_ids, batch.lengths, self.positions, group_sizes=batch.group_sizes, training=training
        )
        return self.scores(hidden, teacher_states)

    def teacher_states(self) -> Tensor | None:
        """What the teacher makes of the batch; before the student's own forward, whose weights must be the active ones
        when its gradient comes."""
        if self.teacher is None or "divergence" not in self.names:
            return None
        batch = self.batch
        with torch.no_grad():
            return self.teacher.policy.hidden(
                batch.input_ids, batch.lengths, self.places["read"], group_sizes=batch.group_sizes
            )

    def scores(self, hidden: Tensor, teacher_states: Tensor | None) -> dict[str, Tensor]:
        """The scores, of the policy's hidden states at :attr:`positions` and the teacher's."""
        wanted = set(self.names)
        read, own, last = hidden.split([len(positions) for positions in self.places.values()])
        scores: dict[str, Tensor] = {}
        if wanted & VOCABULARY_SCORES:
            ids = self.batch.targets[:, None]
            if "candidate_logprobs" in wanted:
                ids = torch.cat([ids, self.batch["candidates"]], dim=1)
            found = score_tokens(
                read,
                self.policy.output_head(),
                sent(ids, hidden.device),
                temperature=self.temperature,
                entropy="entropy" in wanted,
                mean_logprobs="mean_logprobs" in wanted,
                collision="collision" in wanted,
                correct="correct" in wanted,
                chunk_elements=self.budget.logits_elements,
                kept_elements=self.budget.kept_logits,
                accumulate=True,
            )
            scores = {
                "logprobs": found.logprobs[:, 0],
                "candidate_logprobs": found.logprobs[:, 1:],
                "entropy": found.entropy,
                "mean_logprobs": found.mean_logprobs,
                "collision": found.collision,
                "correct": found.correct,
            }
        if self.teacher is not None and teacher_states is not None:
            scores["divergence"] = score_divergence(
                read,
                self.policy.output_head(),
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
        return {name: scores[name] for name in self.names}


def _shape(policy: Policy, batch: Batch, name: str) -> tuple[int, ...]:
    count = batch.num_sequences if name in SEQUENCE_SCORES else batch.num_scored
    if name == "candidate_logprobs":
        return (count, batch["candidates"].shape[1])
    if HEAD_OF_SCORE.get(name) == "classification" and policy.head is not None:
        return (count, policy.head.num_outputs)
    return (count,)


def _entries(micro: MicroBatch, name: str) -> Tensor:
    """Where a micro-batch's scores are in those of the batch."""
    return micro.sequences if name in SEQUENCE_SCORES else micro.tokens


def _part(batch: Batch, micro: MicroBatch, name: str, whole: Tensor) -> Tensor:
    """A micro-batch's entries of the batch's."""
    return whole if micro.batch is batch else whole[beside(_entries(micro, name), whole)]


def _dtype(name: str) -> torch.dtype:
    return torch.bool if name == "correct" else torch.float32


def assemble(
    policy: Policy,
    batch: Batch,
    micros: Sequence[MicroBatch],
    parts: Sequence[Mapping[str, Tensor]],
    names: Collection[str],
) -> dict[str, Tensor]:
    """The scores of micro-batches in the order of the whole batch."""
    if len(micros) == 1 and micros[0].batch is batch:
        return {name: parts[0][name].to(policy.device, _dtype(name)) for name in names}
    whole: dict[str, Tensor] = {}
    for name in names:
        all_of_it = torch.zeros(_shape(policy, batch, name), dtype=_dtype(name), device=policy.device)
        for micro, part in zip(micros, parts, strict=True):
            all_of_it[beside(_entries(micro, name), all_of_it)] = part[name].to(policy.device, all_of_it.dtype)
        whole[name] = all_of_it
    return whole


class ActivationMeter(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves within, weights and buffers of the model not among them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.bytes = 0
        tensors = [*policy.model.parameters(), *policy.model.buffers(), *policy.trainable_parameters().values()]
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor
