"""Whether versions were drawn as often as their weights say; if not, something loses answers, and scores mislead.

The sequential multinomial test of Lindon and Malek, "Anytime-Valid Inference for Multinomial Count Data", NeurIPS
2022, arXiv:2011.03567: the Bayes factor of a Dirichlet mixture against the weights, whose reciprocal is a p-value
that stays valid however often one looks at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CONCENTRATION = 100.0
"""Sum of the Dirichlet parameters: mismatches of about a tenth of the weights are what it looks for first."""


def sample_ratio_p_value(counts: Sequence[int], weights: Sequence[float]) -> float:
    """Probability of counts at least this far from the weights, at any time, if the weights are kept.

    Args:
        counts: how often each version was drawn.
        weights: how often it should be; positive, of any sum.

    Raises:
        ValueError: when the two do not fit together.
    """
    if len(counts) != len(weights) or any(weight <= 0 for weight in weights) or any(count < 0 for count in counts):
        raise ValueError("one count and one positive weight for each version")
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    log_factor = math.lgamma(CONCENTRATION) - math.lgamma(CONCENTRATION + sum(counts))
    for count, share in zip(counts, shares):
        prior = CONCENTRATION * share
        log_factor += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(share)
    return min(1.0, math.exp(-max(log_factor, 0.0)))
