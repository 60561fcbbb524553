"""Reduction of per-token losses to a term: the sum, and the count it is averaged over.

Each reduction is exact for any split of the batch into micro-batches, calls of one accumulation or devices, because
sums and counts add up. A sequence without scored tokens is ignored.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import beside, segment_sum
from gradwire_losses.outputs import Figure, Term
from gradwire_losses.registry import LossConfig

Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "fixed", "sum"]


class ReductionConfig(LossConfig):
    """Arguments that say how per-token losses are averaged."""

    reduction: Reduction = Field(
        "token_mean",
        description="token_mean: over all tokens. sequence_mean: over sequences, of the mean over each one's tokens. "
        "sequence_mean_token_sum: over sequences, of the sum over each one's tokens. fixed: that, divided by "
        "reduction_divisor. sum: not averaged",
    )
    reduction_divisor: float | None = Field(
        None,
        gt=0,
        description='for reduction "fixed": a constant number of tokens, for example the longest response\'s',
    )

    @model_validator(mode="after")
    def _divisor_goes_with_fixed(self) -> Self:
        if self.reduction == "fixed" and self.reduction_divisor is None:
            raise ValueError(
                'reduction "fixed" needs a reduction_divisor, for example the maximum number of tokens of a response'
            )
        if self.reduction != "fixed" and self.reduction_divisor is not None:
            raise ValueError(f'reduction_divisor goes with reduction "fixed", and not with {self.reduction!r}')
        return self


def reduced(losses: Tensor, row_lengths: Tensor, config: ReductionConfig, weights: Tensor | None = None) -> Term:
    """``[T], [S]`` -> a term from per-token losses, as the arguments say.

    Args:
        losses: ``[T]``.
        row_lengths: ``[S]``, on the host.
        config: The reduction.
        weights: ``[T]``, not negative: weight of each token in sums and counts. A token of
            weight 0 is ignored.
    """
    reduction = config.reduction
    weighed = losses if weights is None else torch.where(weights > 0, losses * weights, 0.0)
    if reduction == "token_mean":
        return Term(weighed.sum(), len(losses) if weights is None else weights.double().sum(), "tokens")
    if reduction == "sum":
        return Term(weighed.sum(), 1, "sum")
    if weights is None:
        tokens = beside(row_lengths, losses).to(losses.dtype)
        sequences: Figure = int((row_lengths > 0).sum())
    else:
        tokens = segment_sum(weights, row_lengths)
        sequences = (tokens > 0).sum()
    if reduction == "sequence_mean":
        means = segment_sum(weighed, row_lengths) / torch.where(tokens > 0, tokens, 1.0)
        return Term(means.sum(), sequences, "sequences")
    if reduction == "sequence_mean_token_sum":
        return Term(weighed.sum(), sequences, "sequences")
    assert config.reduction_divisor is not None
    return Term(weighed.sum() / config.reduction_divisor, sequences, "sequences")
