"""How a loss of tokens becomes a term: what it is summed over, and what the sum is averaged over.

Each way is exact however the batch is cut into micro-batches, calls of one accumulation or devices, as sums and
counts add up. A sequence with no scored token counts nowhere.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import segment_mean
from gradwire_losses.outputs import Term
from gradwire_losses.registry import LossConfig

Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "fixed", "sum"]


class ReductionConfig(LossConfig):
    """Arguments that say how a loss of tokens is averaged."""

    reduction: Reduction = Field(
        "token_mean",
        description="token_mean: over all tokens. sequence_mean: over sequences, of the mean over each one's tokens. "
        "sequence_mean_token_sum: over sequences, of the sum over each one's tokens. fixed: that, divided by "
        "reduction_divisor. sum: not averaged",
    )
    reduction_divisor: float | None = Field(
        None, gt=0, description='for reduction "fixed": a constant number of tokens, say the longest response\'s'
    )

    @model_validator(mode="after")
    def _divisor_goes_with_fixed(self) -> Self:
        if (self.reduction == "fixed") != (self.reduction_divisor is not None):
            raise ValueError('reduction_divisor goes with reduction "fixed", and with no other')
        return self


def reduced(losses: Tensor, row_lengths: Tensor, config: ReductionConfig) -> Term:
    """``[T], [S]`` -> a term from a loss a token, as the arguments say."""
    reduction = config.reduction
    if reduction == "token_mean":
        return Term(losses.sum(), len(losses), "tokens")
    if reduction == "sum":
        return Term(losses.sum(), 1, "sum")
    sequences = int((row_lengths > 0).sum())
    if reduction == "sequence_mean":
        return Term(segment_mean(losses, row_lengths).sum(), sequences, "sequences")
    if reduction == "sequence_mean_token_sum":
        return Term(losses.sum(), sequences, "sequences")
    assert config.reduction_divisor is not None
    return Term(losses.sum() / config.reduction_divisor, sequences, "sequences")
