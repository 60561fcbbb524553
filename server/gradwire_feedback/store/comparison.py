"""The A/B comparison: from the results of a deployment to a conclusion."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_feedback.statistics.sample_ratio import sample_ratio_p_value
from gradwire_feedback.statistics.user_effects import (
    MIN_USERS,
    Interval,
    difference_interval,
    mean_interval,
    number_of_users,
)
from gradwire_feedback.store.deployments import Observed

ALPHA = 0.05
SAMPLE_RATIO_ALPHA = 0.001
"""Small, because a false alarm makes people distrust a sound test, and real losses of answers show soon."""


@dataclass(frozen=True)
class VersionResult:
    """Scores of one version.

    Attributes:
        count: Number of rated answers.
        users: Number of users whose answers were rated, plus rated answers without a user.
    """

    version: str
    weight: float
    count: int
    users: int
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
        users = {each.version: each.users for each in self.versions}
        parts = []
        for each in self.differences:
            few = [name for name in (each.baseline, each.version) if users[name] < MIN_USERS]
            if few:
                have = " and ".join(f"{name} has {users[name]}" for name in few)
                parts.append(f"{each.version} against {each.baseline}: too few users yet ({MIN_USERS} wanted, {have}).")
            elif each.better is None:
                parts.append(f"{each.version} against {each.baseline} is not settled: collect more ratings.")
            else:
                worse = each.baseline if each.better == each.version else each.version
                parts.append(f"{each.better} is better than {worse}.")
        return " ".join(parts)


def compare(observed: Observed) -> Comparison:
    """Compare the oldest version with each other one."""
    names = list(observed.weights)
    versions = []
    for number, name in enumerate(names):
        own = observed.scores.only(number)
        mean = float(own.values.mean()) if len(own) else None
        span = mean_interval(own, ALPHA)
        versions.append(VersionResult(name, observed.weights[name], len(own), number_of_users(own), mean, span))
    differences = []
    for number, name in enumerate(names[1:], 1):
        found, span = difference_interval(observed.scores, 0, number, ALPHA / (len(names) - 1))
        differences.append(DifferenceResult(names[0], name, found, span))
    p_values = [
        sample_ratio_p_value([stage.units[name] for name in names], [stage.weights[name] for name in names])
        for stage in observed.stages
    ]
    return Comparison(tuple(versions), tuple(differences), min(1.0, len(p_values) * min(p_values)))
