"""The frozen model that a loss compares with: the one a call names, or log-probabilities given with the batch."""

from __future__ import annotations

from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores
from gradwire_losses.registry import ReferenceConfig


def has_reference(config: ReferenceConfig, present: frozenset[str], field: str = "ref_log_probs") -> bool:
    """Whether the call names a reference or the batch brings its log-probabilities."""
    return field in present or config.reference_model is not None


def computed_by_engine(config: ReferenceConfig, present: frozenset[str], field: str = "ref_log_probs") -> bool:
    """Whether the score ``ref_logprobs`` is needed: a batch's own log-probabilities come before it."""
    return field not in present and config.reference_model is not None


def require_reference(loss: str, config: ReferenceConfig, present: frozenset[str], field: str) -> None:
    """For a loss that has no meaning without a reference.

    Raises:
        BatchError: of the field ``reference_model``, when there is none.
    """
    if not has_reference(config, present, field):
        raise BatchError(
            f'{loss} compares the policy with a reference: give reference_model, "base" for the weights that this run '
            f"started from, or the batch field {field}",
            field="reference_model",
            rule="a reference",
        )


def reference_logprobs(batch: Batch, scores: Scores) -> Tensor | None:
    """``[T]``: the reference's log-probabilities, from the batch if it brings them; None without a reference."""
    given = batch.get("ref_log_probs")
    if given is not None:
        return given
    return scores.ref_logprobs if "ref_logprobs" in scores else None
