"""The A/B comparison: from what a deployment gave to what may be concluded from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwire_feedback.statistics.confidence_sequences import Interval, difference_interval, interval
from gradwire_feedback.statistics.sample_ratio import sample_ratio_p_value
from gradwire_feedback.store.deployments import Observed

ALPHA = 0.05
SAMPLE_RATIO_ALPHA = 0.001
"""A false alarm here makes people distrust a sound test, and real losses of answers show soon: hence so small."""


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
    """The baseline against one other version; all such intervals hold at once with probability 1 - ALPHA."""

    baseline: str
    version: str
    difference: float | None
    interval: Interval

    @property
    def better(self) -> str | None:
        """The version that is better beyond doubt, or None as long as there is none."""
        if self.interval.low > 0:
            return self.version
        return self.baseline if self.interval.high < 0 else None


@dataclass(frozen=True)
class Comparison:
    """What the A/B test says by now."""

    versions: tuple[VersionResult, ...]
    differences: tuple[DifferenceResult, ...]
    sample_ratio_p: float

    @property
    def sample_ratio_ok(self) -> bool:
        return self.sample_ratio_p >= SAMPLE_RATIO_ALPHA

    @property
    def settled(self) -> bool:
        """Whether every other version is told apart from the baseline, on a sound sample."""
        return self.sample_ratio_ok and all(each.better is not None for each in self.differences)

    @property
    def verdict(self) -> str:
        """The comparison in a sentence."""
        if not self.sample_ratio_ok:
            return (
                "Do not trust these scores: the versions were not drawn as their weights say "
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
    """Compares the oldest of the versions with each other one."""
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
