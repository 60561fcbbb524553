"""Test whether versions were drawn in proportion to their weights; if not, answers are lost and scores are biased.

The sequential multinomial test of Lindon and Malek, "Anytime-Valid Inference for Multinomial Count Data", NeurIPS 2022,
arXiv:2011.03567: the Bayes factor of a Dirichlet mixture against the weights, whose reciprocal is a p-value that stays
valid however often it is inspected."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONCENTRATION = 100.0
"""Sum of the Dirichlet parameters: most sensitive to mismatches of about a tenth of the weights."""


def sample_ratio_p_value(counts: Sequence[int], weights: Sequence[float]) -> float:
    """Probability of counts at least this far from the weights, at any time, if the weights are kept.

    Args:
        counts: Number of draws of each version.
        weights: Weights of the versions; positive, any sum.

    Raises:
        ValueError: ``counts`` and ``weights`` do not match.
    """
    if len(counts) != len(weights) or any(weight <= 0 for weight in weights) or any(count < 0 for count in counts):
        raise ValueError("each version needs one count and one positive weight")
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    log_factor = math.lgamma(CONCENTRATION) - math.lgamma(CONCENTRATION + sum(counts))
    for count, share in zip(counts, shares):
        prior = CONCENTRATION * share
        log_factor += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(share)
    return min(1.0, math.exp(-max(log_factor, 0.0)))
