"""The report of a training, read from its version's folder: the reward model's quality, curves, and examples."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import gradwire
from gradwire.rlhf import RewardModelReport, TrainingResult

from gradwire_feedback.training.examples import Example, read_examples
from gradwire_feedback.training.preferences import PreferenceResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingReport:
    """A training, in figures.

    Attributes:
        reward_model: How well held-out ratings are predicted; None if none were held out, and after DPO.
        preferences: The figures of DPO, on held-out pairs; None after PPO.
        curves: Figures of each step by name; NaN where a step had none.
        examples: Answers before and after.
    """

    reward_model: RewardModelReport | None = None
    preferences: PreferenceResult | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)


def read_report(folder: Path, method: str) -> TrainingReport:
    """Read a version's report; an empty one if its files are missing or damaged, which is logged."""
    examples = read_examples(folder)
    try:
        if method == "dpo":
            found = PreferenceResult.load(folder)
            return TrainingReport(preferences=found, curves=found.curves, examples=examples)
        result = TrainingResult.load(folder)
    except (OSError, ValueError, TypeError, KeyError, gradwire.InvalidArgumentError) as error:
        log.warning("no report in %s: %s", folder, error)
        return TrainingReport(examples=examples)
    curves = {
        "reward": result.reward_history,
        "kl": result.kl_history,
        "loss": result.loss_history,
        "valueError": result.value_error_history,
    }
    return TrainingReport(result.reward_model_report, curves=curves, examples=examples)


def finite(value: float) -> float | None:
    """Convert NaN, which JSON has not, to None."""
    return value if math.isfinite(value) else None
