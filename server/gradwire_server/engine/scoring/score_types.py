"""The scores of a batch under a policy: their names, requirements and shapes.

Legend: ``S`` sequences, ``T`` scored tokens. Scores are flat, in the order of the batch, float32 (``correct``: bool),
on the policy's device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from gradwire_losses.batch import Batch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import MicroBatch

VOCABULARY_SCORES = frozenset({"logprobs", "entropy", "correct", "candidate_logprobs", "mean_logprobs", "collision"})
"""Scores that need the logits."""
SEQUENCE_SCORES = frozenset({"rewards", "class_logits"})
"""Scores with one value per sequence, read at its last token."""
OWN_SCORES = frozenset({"token_rewards", "token_class_logits"})
"""Scores read at the token itself."""
HEAD_OF_SCORE = {
    "values": "value",
    "token_rewards": "reward",
    "rewards": "reward",
    "class_logits": "classification",
    "token_class_logits": "classification",
}
VALUES_WITHOUT_HEAD = (
    "; a forward_backward with enhanced_ppo adds one that starts at zero, and needs none with values or advantages in "
    "the batch"
)
SCORES = VOCABULARY_SCORES | {"divergence"} | set(HEAD_OF_SCORE)


@dataclass(frozen=True)
class Teacher:
    """The policy and divergence for the score ``divergence``.

    Attributes:
        policy: A frozen policy with the student's vocabulary.
        beta: Choice of divergence; see :mod:`.divergence`.
    """

    policy: Policy
    beta: float


def check_scores(
    policy: Policy, names: Collection[str], teacher: Teacher | None = None, *, field: str = "outputs"
) -> None:
    """Check that a policy can compute these scores.

    Raises:
        OperationError: INVALID_ARGUMENT for an unknown name or a teacher with another vocabulary; UNSUPPORTED if the
            run lacks the head, or if there is no teacher.
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
                f'{name} need a {kind} head, and this run has none: fork_run(checkpoint, head="{kind}") gives one to '
                f'what it has learned, and create_run(model, head="{kind}") to a new run'
                + (VALUES_WITHOUT_HEAD if kind == "value" else ""),
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
    """Check that a batch has candidates if a score needs them."""
    if "candidate_logprobs" in names and "candidates" not in batch.fields:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_BATCH,
            "candidate_logprobs are those of the batch's candidates [rows, tokens, candidates], which it has not",
            field="candidates",
            rule="given for candidate_logprobs",
        )


def score_shape(policy: Policy, batch: Batch, name: str) -> tuple[int, ...]:
    """Shape of a score of the whole batch: ``[T, ...]`` or (:data:`SEQUENCE_SCORES`) ``[S, ...]``."""
    count = batch.num_sequences if name in SEQUENCE_SCORES else batch.num_scored
    if name == "candidate_logprobs":
        return (count, batch["candidates"].shape[1])
    if HEAD_OF_SCORE.get(name) == "classification" and policy.head is not None:
        return (count, policy.head.num_outputs)
    return (count,)


def score_dtype(name: str) -> torch.dtype:
    return torch.bool if name == "correct" else torch.float32


def entries_of(micro: MicroBatch, name: str) -> Tensor:
    """Indices of a micro-batch's entries of a score in those of the whole batch."""
    return micro.sequences if name in SEQUENCE_SCORES else micro.tokens
