"""The distribution of an agent's scores, with advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire_feedback.statistics.user_effects import Interval

MINIMUM_FEEDBACK = 10
ENOUGH_FEEDBACK = 50
NEAR_MIDDLE = Interval(0.4, 0.6)
MOSTLY = 0.8
LITTLE_SPREAD = 0.1
BINS = 10


@dataclass(frozen=True)
class Distribution:
    """Scores of an agent.

    Attributes:
        count: Number of scores.
        mean: Mean; None without scores.
        std: Population standard deviation; None without scores.
        histogram: Counts in ten bins of equal width over 0..1.
        advice: Sentences for the person who collects the scores; empty if there is nothing to improve.
    """

    count: int
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    advice: tuple[str, ...]


def distribution(scores: Sequence[float]) -> Distribution:
    values = np.asarray(scores, np.float64)
    bins = np.minimum(np.floor(np.round(values * BINS, 9)), BINS - 1).astype(np.int64)  # 0.3 is 0.3, not just below
    histogram = tuple(int(count) for count in np.bincount(bins, minlength=BINS))
    if not values.size:
        return Distribution(0, None, None, histogram, _advice(values))
    return Distribution(values.size, float(values.mean()), float(values.std()), histogram, _advice(values))


def _advice(values: np.ndarray) -> tuple[str, ...]:
    advice = []
    if values.size < MINIMUM_FEEDBACK:
        advice.append(
            f"Too few scores: {values.size} of the {MINIMUM_FEEDBACK} that training needs, "
            f"{MINIMUM_FEEDBACK - values.size} are missing."
        )
    elif values.size < ENOUGH_FEEDBACK:
        advice.append(
            f"{values.size} scores are enough to try the pipeline; collect {ENOUGH_FEEDBACK} or more before you "
            "trust a result."
        )
    if values.size < MINIMUM_FEEDBACK:
        return tuple(advice)
    middle = float(np.mean((values >= NEAR_MIDDLE.low) & (values <= NEAR_MIDDLE.high)))
    if middle > MOSTLY:
        advice.append(
            f"{middle:.0%} of the scores are near 0.5: the reward model learns nothing from them. Use the whole "
            "scale: above 0.7 for good answers, below 0.3 for bad ones."
        )
    elif float(np.mean(values > 0.5)) > MOSTLY:
        advice.append(
            "One-sided: almost all scores are high. Rate weak answers as well, down to 0, or ask harder prompts."
        )
    elif float(np.mean(values < 0.5)) > MOSTLY:
        advice.append("One-sided: almost all scores are low. Good answers are missing, above 0.7: add some.")
    if middle <= MOSTLY and float(values.std()) < LITTLE_SPREAD:
        advice.append(f"The scores differ little (standard deviation {values.std():.2f}): spread them over 0 to 1.")
    return tuple(advice)
