"""The frozen reference model of a loss: named in the call, or given as log-probabilities in the batch."""

from __future__ import annotations

from torch import Tensor

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.registry import ReferenceConfig


def computed_by_engine(config: ReferenceConfig, present: frozenset[str]) -> bool:
    """Whether the score ``ref_logprobs`` is needed: log-probabilities in the batch take precedence."""
    return "ref_log_probs" not in present and config.reference_model is not None


def reference_logprobs(batch: Batch, scores: Scores) -> Tensor | None:
    """``[T]``: the reference's log-probabilities, from the batch if present; None without a reference."""
    given = batch.get("ref_log_probs")
    if given is not None:
        return given
    return scores.ref_logprobs if "ref_logprobs" in scores else None
