"""The frozen model that a loss compares with: the one a call names, or log-probabilities given with the batch."""

from __future__ import annotations

from torch import Tensor

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.registry import ReferenceConfig


def computed_by_engine(config: ReferenceConfig, present: frozenset[str]) -> bool:
    """Whether the score ``ref_logprobs`` is needed: a batch's own log-probabilities come before it."""
    return "ref_log_probs" not in present and config.reference_model is not None


def reference_logprobs(batch: Batch, scores: Scores) -> Tensor | None:
    """``[T]``: the reference's log-probabilities, from the batch if it brings them; None without a reference."""
    given = batch.get("ref_log_probs")
    if given is not None:
        return given
    return scores.ref_logprobs if "ref_logprobs" in scores else None
