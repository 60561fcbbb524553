"""Scores of a batch under a policy, micro-batch by micro-batch, and the way back from them to the weights.

Legend: ``S`` sequences, ``T`` scored tokens. Scores come out flat, in the order of the batch, float32, on the CPU,
where losses are evaluated: they are small, and a loss reads many figures off them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from gradwire_losses.batch import Batch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.accumulate import GradientCollector, Key
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.host import generator_states, preserved_rng, set_generator_states
from gradwire_server.engine.planner import Budget, MicroBatch, split
from gradwire_server.engine.policy import Policy
from gradwire_server.engine.scoring import score_tokens

VOCABULARY_SCORES = frozenset({"logprobs", "entropy", "correct", "candidate_logprobs", "mean_logprobs", "collision"})
"""Those that need the logits."""
SCORES = VOCABULARY_SCORES | {"values", "token_rewards", "rewards"}
HEAD_OF_SCORE = {"values": "value", "token_rewards": "reward", "rewards": "reward"}


def check_scores(policy: Policy, names: Collection[str], *, field: str = "outputs") -> None:
    """Checks that a policy can give these scores.

    Raises:
        OperationError: INVALID_ARGUMENT for a name that is none; UNSUPPORTED where the run lacks the head.
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


def score_batch(
    policy: Policy, batch: Batch, names: Collection[str], *, temperature: float = 1.0, budget: Budget
) -> dict[str, Tensor]:
    """Scores without gradients, in evaluation mode: name -> ``[T]`` or (rewards) ``[S]``.

    Raises:
        OperationError: as :func:`check_scores`.
    """
    check_scores(policy, names)
    micros = split(batch, budget.microbatch_tokens)
    with torch.no_grad():
        parts = [_score(policy, micro.batch, names, temperature, budget, training=False) for micro in micros]
    return _assemble(batch, micros, parts, names)


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
        budget: Budget,
        micros: Sequence[MicroBatch] | None = None,
        keep_single: bool = False,
    ) -> None:
        check_scores(policy, names, field="scores")
        self.policy = policy
        self.batch = batch
        self.names = frozenset(names)
        self._temperature = temperature
        self._budget = budget
        self._micros = split(batch, budget.microbatch_tokens) if micros is None else micros
        self._graphs: list[dict[str, Tensor] | None] = []
        self._rng: list[dict[str, Tensor]] = []
        parts = self._forward(unmeasured=keep_single and len(self._micros) == 1)
        self.by_name = _assemble(batch, self._micros, parts, names)
        self.recomputed = any(graph is None for graph in self._graphs)

    @property
    def num_microbatches(self) -> int:
        return len(self._micros)

    def _forward(self, *, unmeasured: bool) -> list[dict[str, Tensor]]:
        budget, kept_bytes, bytes_per_token = self._budget.activation_bytes, 0, 0.0
        parts = []
        for micro in self._micros:
            self._rng.append(generator_states())
            keep = unmeasured or kept_bytes + bytes_per_token * micro.padded_tokens <= budget
            if unmeasured:
                scores = self._score(micro)
            elif keep:
                meter = _ActivationMeter(self.policy)
                with meter:
                    scores = self._score(micro)
                bytes_per_token = max(bytes_per_token, meter.bytes / max(1, micro.padded_tokens))
                keep = kept_bytes + meter.bytes <= budget
                kept_bytes += meter.bytes if keep else 0
            else:
                with torch.no_grad():
                    scores = self._score(micro)
            self._graphs.append(scores if keep else None)
            parts.append({name: values.detach() for name, values in scores.items()})
        return parts

    def _score(self, micro: MicroBatch) -> dict[str, Tensor]:
        return _score(self.policy, micro.batch, self.names, self._temperature, self._budget, training=True)

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
                pairs = [
                    (scores[name], gradient[micro.sequences if name == "rewards" else micro.tokens])
                    for name, gradient in by_name.items()
                ]
                pairs = [(score, gradient) for score, gradient in pairs if score.requires_grad and gradient.any()]
                if pairs:
                    parts.append((key, pairs))
            for number, (key, pairs) in enumerate(parts, start=1):
                collector.backward(
                    key,
                    [score for score, _ in pairs],
                    [gradient.to(score.device, score.dtype, non_blocking=True) for score, gradient in pairs],
                    retain_graph=number < len(parts),
                )


def _score(
    policy: Policy, batch: Batch, names: Collection[str], temperature: float, budget: Budget, *, training: bool
) -> dict[str, Tensor]:
    """Scores of one micro-batch, in one forward of the trunk, on the policy's device."""
    wanted, nowhere = set(names), torch.empty(0, dtype=torch.int64)
    places = {
        "read": batch.read_positions if wanted & (VOCABULARY_SCORES | {"values"}) else nowhere,
        "own": batch.own_positions if "token_rewards" in wanted else nowhere,
        "last": batch.lengths.cumsum(0) - 1 if "rewards" in wanted else nowhere,
    }
    if not any(len(positions) for positions in places.values()):
        return {name: torch.zeros(_shape(batch, name), dtype=_dtype(name)) for name in names}
    hidden = policy.hidden(batch.input_ids, batch.lengths, torch.cat(list(places.values())), training=training)
    read, own, last = hidden.split([len(positions) for positions in places.values()])
    scores: dict[str, Tensor] = {}
    if wanted & VOCABULARY_SCORES:
        ids = batch.targets[:, None]
        if "candidate_logprobs" in wanted:
            ids = torch.cat([ids, batch["candidates"]], dim=1)
        found = score_tokens(
            read,
            policy.output_head(),
            ids.to(hidden.device, non_blocking=True),
            temperature=temperature,
            entropy="entropy" in wanted,
            mean_logprobs="mean_logprobs" in wanted,
            collision="collision" in wanted,
            chunk_elements=budget.logits_elements,
        )
        scores = {
            "logprobs": found.logprobs[:, 0],
            "candidate_logprobs": found.logprobs[:, 1:],
            "entropy": found.entropy,
            "mean_logprobs": found.mean_logprobs,
            "collision": found.collision,
            "correct": found.correct,
        }
    if policy.head is not None:
        for name, states in (("values", read), ("token_rewards", own), ("rewards", last)):
            if name in wanted:
                scores[name] = policy.head(states)
    return {name: scores[name] for name in names}


def _shape(batch: Batch, name: str) -> tuple[int, ...]:
    if name == "rewards":
        return (batch.num_sequences,)
    return tuple(batch["candidates"].shape) if name == "candidate_logprobs" else (batch.num_scored,)


def _dtype(name: str) -> torch.dtype:
    return torch.bool if name == "correct" else torch.float32


def _assemble(
    batch: Batch, micros: Sequence[MicroBatch], parts: Sequence[Mapping[str, Tensor]], names: Collection[str]
) -> dict[str, Tensor]:
    """The scores of micro-batches in the order of the whole batch."""
    whole: dict[str, Tensor] = {}
    for name in names:
        whole[name] = torch.zeros(_shape(batch, name), dtype=_dtype(name))
        for micro, part in zip(micros, parts, strict=True):
            whole[name][micro.sequences if name == "rewards" else micro.tokens] = part[name].to(
                "cpu", whole[name].dtype
            )
    return whole


class _ActivationMeter(torch.autograd.graph.saved_tensors_hooks):
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
