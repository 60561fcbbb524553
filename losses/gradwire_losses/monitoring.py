"""Monitoring advice: metrics outside their usual ranges, and what to do about them.

The ranges are rules of thumb for language models, per token and in nats. There are two kinds. Alarms are wide: a
healthy run triggers none, and each call beyond them reports one. Hints are the narrower target ranges that a loss
declares; :class:`Advisor` reports them sparingly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """The usual range of a metric, and advice for either side of it.

    Attributes:
        low, high: Bounds; values beyond them are reported.
        below, above: Advice: the value's meaning, and a remedy.
    """

    low: float = -math.inf
    high: float = math.inf
    below: str = ""
    above: str = ""

    def warning(self, name: str, value: float) -> str | None:
        if value < self.low:
            return f"{name} is {value:.3g}, usually at least {self.low:g}: {self.below}"
        if value > self.high:
            return f"{name} is {value:.3g}, usually at most {self.high:g}: {self.above}"
        return None


_STALE = (
    "the policy is far from the one that wrote the batch, or their log-probabilities differ in temperature or in "
    "masks. Take fewer steps on one batch, lower the learning rate, or sample anew"
)
_RATIO = Range(low=0.5, high=2.0, below=_STALE, above=_STALE)
_LARGEST_RATIO = Range(high=100.0, above=f"single tokens or rows dominate the gradient. Truncate the ratio; {_STALE}")

USUAL_RANGES: Mapping[str, Range] = {
    "approx_kl": Range(high=0.1, above=_STALE),
    "kl_divergence": Range(
        high=1.0, above="the policy has left its reference. Raise beta, lower the learning rate, or stop earlier"
    ),
    "clip_fraction": Range(
        high=0.4, above="much of the batch gives no gradient. Lower the learning rate or take fewer steps on one batch"
    ),
    "explained_variance": Range(
        low=-0.5,
        below="the values predict the returns worse than a constant would. Train the critic first or for more steps, "
        "or raise its learning rate; in the first steps of a run this is normal",
    ),
    "entropy": Range(
        low=0.01,
        below="the policy is almost deterministic and no longer explores. Raise entropy_coef or the sampling "
        "temperature, or lower the learning rate",
    ),
    "is_ratio_mean": _RATIO,
    "ratio_mean": _RATIO,
    "is_ratio_max": _LARGEST_RATIO,
    "ratio_max": _LARGEST_RATIO,
    "zero_spread_groups": Range(
        high=0.8,
        above="in most groups all rewards are equal and give no gradient. Choose prompts that are neither too easy nor "
        "too hard, or sample more responses to each",
    ),
}


PPO_HINTS: Mapping[str, Range] = {
    "kl_divergence": Range(high=0.05, above="reduce learning_rate, or increase beta"),
    "clip_fraction": Range(
        low=0.1,
        high=0.3,
        below="the clip is rarely active; reduce clip_epsilon",
        above="much of the batch gives no gradient; reduce learning_rate, or take fewer steps on one batch",
    ),
    "explained_variance": Range(
        low=0.5,
        below="the critic explains little of the returns; raise value_loss_coef, or train it alone with value_only",
    ),
    "advantage_std": Range(
        low=0.5, high=2.0, below="set whiten_advantages to True", above="set whiten_advantages to True"
    ),
}
"""Target ranges from PPO's documentation."""

FIRST_STEPS = 5
UNMOVED = 1e-6


@dataclass
class Advisor:
    """Hints for one run: none in its first steps, and one each time a metric leaves its range.

    Attributes:
        outside: The metrics that are currently out of range, by loss, name and side.
    """

    outside: set[tuple[str, str, str]] = field(default_factory=set)

    def hints(self, loss: str, ranges: Mapping[str, Range], metrics: Mapping[str, float], step: int) -> list[str]:
        """Return one sentence for each metric that has just left its range.

        Args:
            loss: The loss's name.
            ranges: The ranges it declares.
            metrics: Metrics of this call. NaN is ignored, and so is a low ``clip_fraction`` while the policy is still
                the one that wrote the batch (``approx_kl`` is 0).
            step: Number of optimizer steps so far.
        """
        if step < FIRST_STEPS:
            return []
        sentences = []
        for name, usual in ranges.items():
            value = metrics.get(name, math.nan)
            if math.isnan(value) or (name == "clip_fraction" and metrics.get("approx_kl", 1.0) < UNMOVED):
                continue
            for side, out in (("below", value < usual.low), ("above", value > usual.high)):
                spell = (loss, name, side)
                if out and spell not in self.outside and (sentence := usual.warning(name, value)):
                    sentences.append(sentence)
                (self.outside.add if out else self.outside.discard)(spell)
        return sentences


def usual_range_warnings(metrics: Mapping[str, float]) -> list[str]:
    """Return one sentence for each metric outside its usual range; NaN (a mean over nothing) is ignored."""
    found = (USUAL_RANGES[name].warning(name, value) for name, value in metrics.items() if name in USUAL_RANGES)
    return [sentence for sentence in found if sentence is not None]
