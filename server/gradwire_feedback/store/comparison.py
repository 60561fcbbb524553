"""The A/B comparison: from the results of a deployment to a conclusion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwire_feedback.statistics.confidence_sequences import Interval, difference_interval, interval
from gradwire_feedback.statistics.sample_ratio import sample_ratio_p_value
from gradwire_feedback.store.deployments import Observed

ALPHA = 0.05
SAMPLE_RATIO_ALPHA = 0.001
"""Small, because a false alarm makes people distrust a sound test, and real losses of answers show soon."""


@dataclass(frozen=True)
class VersionResult:
    """Scores of one version."""

    version: str
    weight: float
    count: int
    mean: float | None
    interval: Interval


@dataclass(frozen=True)
class DifferenceResult:
    """The baseline compared with one other version; all these intervals hold at once with probability 1 - ALPHA."""

    baseline: str
    version: str
    difference: float | None
    interval: Interval

    @property
    def better(self) -> str | None:
        """The better version if the difference is significant, else None."""
        if self.interval.low > 0:
            return self.version
        return self.baseline if self.interval.high < 0 else None


@dataclass(frozen=True)
class Comparison:
    """The current result of the A/B test."""

    versions: tuple[VersionResult, ...]
    differences: tuple[DifferenceResult, ...]
    sample_ratio_p: float

    @property
    def sample_ratio_ok(self) -> bool:
        return self.sample_ratio_p >= SAMPLE_RATIO_ALPHA

    @property
    def settled(self) -> bool:
        """Whether every other version differs significantly from the baseline, on a sound sample."""
        return self.sample_ratio_ok and all(each.better is not None for each in self.differences)

    @property
    def verdict(self) -> str:
        """Summarise the comparison in a sentence."""
        if not self.sample_ratio_ok:
            return (
                "Do not trust these scores: the versions were not drawn in proportion to their weights "
                f"(p = {self.sample_ratio_p:.2g}). Look for requests that are lost or repeated."
            )
        parts = []
        for each in self.differences:
            if each.better is None:
                parts.append(f"{each.version} against {each.baseline} is not settled: collect more ratings.")
            else:
                worse = each.baseline if each.better == each.version else each.version
                parts.append(f"{each.better} is better than {worse}.")
        return " ".join(parts)


def compare(observed: Observed) -> Comparison:
    """Compare the oldest version with each other one."""
    names = list(observed.scores)
    versions = []
    for name in names:
        scores = observed.scores[name]
        mean = float(np.mean(scores)) if scores else None
        versions.append(VersionResult(name, observed.weights[name], len(scores), mean, interval(scores, ALPHA)))
    baseline, alpha = versions[0], ALPHA / (len(versions) - 1)
    differences = []
    for other in versions[1:]:
        span = difference_interval(observed.scores[baseline.version], observed.scores[other.version], alpha)
        both = baseline.mean is not None and other.mean is not None
        difference = other.mean - baseline.mean if both else None  # type: ignore[operator]  # both are numbers
        differences.append(DifferenceResult(baseline.version, other.version, difference, span))
    p_value = sample_ratio_p_value([observed.units[name] for name in names], [observed.weights[n] for n in names])
    return Comparison(tuple(versions), tuple(differences), p_value)
