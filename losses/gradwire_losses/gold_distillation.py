"""Distillation from a teacher with another tokenizer, from candidates that are stored with the batch.

``T`` scored tokens, ``P`` pieces: runs of tokens after which both tokenizers have come to the same place of the text,
``K`` candidates of each side at a piece's last token, ``S`` rows.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_ids, segment_sum, select
from gradwire_losses.distillation import TOKEN_CANDIDATES
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, ROW_TOKENS, row_field
from gradwire_losses.outputs import LossOutput, Mean, Sum
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.registry import FieldSpec, TemperatureConfig, register_loss


class GOLDConfig(TemperatureConfig, ReductionConfig):
    """Arguments of ``gold``."""

    beta: float = Field(
        0.5,
        ge=0,
        le=1,
        description="divergence of the tokens that both have: 0 is KL(T || S), 1 is KL(S || T), between them "
        "beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S",
    )
    shared_weight: float = Field(1.0, ge=0, description="weight of that divergence")
    own_weight: float = Field(1.0, ge=0, description="weight of the distance of the other tokens' sorted probabilities")
    reduction: Reduction = Field(
        "sequence_mean",
        description="sequence_mean: over rows, of the mean over each one's pieces; token_mean: over pieces",
    )


def _marks(name: str, shapes: tuple[str, ...], description: str) -> FieldSpec:
    return FieldSpec(name, "bool", shapes, description, aligned_with="input_ids")


@register_loss(
    "gold",
    config=GOLDConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        _marks(
            "piece_ends",
            ROW_TOKENS,
            "1 at the last token of each piece of text after which the teacher's tokens end too; if absent, every "
            "token. Tokens after a row's last end, and entries of the other fields elsewhere, have no effect.",
        ),
        FieldSpec(
            "student_token_ids",
            "int",
            TOKEN_CANDIDATES,
            "Candidates of the student in the place of a piece's last token.",
            required=True,
            aligned_with="input_ids",
            ids=True,
        ),
        row_field(
            "teacher_log_probs",
            TOKEN_CANDIDATES,
            "Log-probabilities of the teacher's candidates in the place of the piece's last token in its own tokens, "
            "plus those of the piece's earlier tokens; -1e30 for none.",
            required=True,
        ),
        _marks(
            "shared",
            TOKEN_CANDIDATES,
            "1 where the entries of both are the same token; if absent, nowhere.",
        ),
        _marks(
            "own",
            TOKEN_CANDIDATES,
            "1 where the student's candidate is a token that the teacher does not have; if absent, wherever shared is "
            "0. Neither is no candidate.",
        ),
    ),
    scores=("logprobs", "candidate_logprobs"),
    metrics={
        "shared_divergence": "mean divergence per piece, over the tokens that both have (nats)",
        "own_distance": "mean distance per piece of the other tokens' sorted probabilities",
        "teacher_mass": "mean probability per piece of the teacher's candidates and earlier tokens",
        "student_mass": "the same of the student",
        "num_pieces": "pieces",
        "num_tokens": "scored tokens",
    },
    reference="Patino et al. 2025, Unlocking On-Policy Distillation for Any Model Family (GOLD); Boizard et al. 2024, "
    "Towards Cross-Tokenizer Distillation (arXiv 2402.12030)",
    formula="1/S sum_i 1/P_i sum_p [w_shared JSD_beta(T_p, S_p) over shared tokens + w_own sum_k |sort(T_p)_k - "
    "sort(S_p)_k| over the others], S_p(v) = p(v) at the piece's last token times p of its earlier tokens",
    streams=True,
)
def gold(batch: Batch, scores: Scores, config: GOLDConfig) -> LossOutput:
    """Distillation across tokenizers: compares what student and teacher expect where their tokens end together.

    Tokens that both vocabularies have are compared one by one, the others by their sorted probabilities (ULD). The
    fields come from :func:`gradwire.data.gold_fields`. With all tokens as candidates it is exact.

    Raises:
        BatchError: ``teacher_log_probs`` has not as many candidates as ``student_token_ids``."""
    lengths, logprobs = batch.row_lengths, scores.logprobs
    theirs, candidates = batch["teacher_log_probs"], scores.candidate_logprobs
    if theirs.shape != candidates.shape:
        raise BatchError(
            f"teacher_log_probs has {theirs.shape[1]} candidates per token, but student_token_ids has "
            f"{candidates.shape[1]}",
            field="teacher_log_probs",
            rule="the shape of student_token_ids",
        )
    ends = (
        batch.host["piece_ends"].bool() if "piece_ends" in batch.fields else torch.ones(len(logprobs), dtype=torch.bool)
    )
    pieces = ends.cumsum(0) - ends.long() + segment_ids(lengths)  # a row's rest is of no other row's piece
    earlier = logprobs.new_zeros(int(pieces[-1]) + 1 if len(pieces) else 0)
    earlier = earlier.index_add(0, beside(pieces, logprobs), torch.where(beside(ends, logprobs), 0.0, logprobs))
    student = select(candidates, ends) + earlier[beside(pieces[ends], logprobs)][:, None]
    teacher = select(theirs, ends)
    shared = select(batch["shared"], ends).bool() if "shared" in batch.fields else torch.zeros_like(teacher).bool()
    own = select(batch["own"], ends).bool() & ~shared if "own" in batch.fields else ~shared

    divergence = _divergence(torch.where(shared, teacher, 0.0), torch.where(shared, student, 0.0), config.beta)
    expected, found = torch.where(shared, 0.0, teacher.exp()), torch.where(own, student.exp(), 0.0)
    distance = (expected.sort(dim=-1).values - found.sort(dim=-1).values).abs().sum(dim=-1)
    losses = config.shared_weight * divergence + config.own_weight * distance
    return LossOutput(
        {"distillation": reduced(losses, segment_sum(ends.long(), lengths), config)},
        {
            "shared_divergence": Mean.of(divergence),
            "own_distance": Mean.of(distance),
            "teacher_mass": Mean.of(teacher.exp().sum(dim=-1)),
            "student_mass": Mean.of(torch.where(shared | own, student.exp(), 0.0).sum(dim=-1)),
            "num_pieces": Sum(int(ends.sum())),
            "num_tokens": Sum(batch.num_scored),
        },
    )


def _divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """``[P, K], [P, K] -> [P]``: the divergence of log-probabilities, which need not add up to 1; 0 for equal ones."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(dim=-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(dim=-1)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(dim=-1)
    return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixture)).sum(dim=-1)
