"""Learning rates of recipes: the peak by a rule, and how it is reached and left.

The rule has three factors: what is learned, the model's width, and whether an adapter or all weights are trained.

* :data:`PEAKS`. That of answers is Tinker's, ``5e-4 * (2000 / hidden_size) ** power``; docs/lora.md has what was
  measured of each.
* The width, with the power 1/2, between Tinker's 0.0775 for Qwen and 0.781 for Llama. At a width of 4,096 an adapter
  has 3.5e-4, where Tinker has 2.9e-4 for Llama and 4.7e-4 for Qwen, and Unsloth 2e-4.
* All weights take a tenth of an adapter's rate (Schulman et al., LoRA Without Regret, 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gradwire import schedules
from gradwire.recipes.settings import Learned, Settings

PEAKS: Mapping[Learned, float] = {"answers": 5e-4, "scores": 1.5e-4, "preferences": 1.5e-4, "policy": 1e-4}
"""What is learned -> the peak for an adapter of a model that is :data:`WIDTH` wide."""
WIDTH = 2000
ALL_WEIGHTS = 0.1
"""The rate of all weights, as a share of an adapter's."""


def learning_rate(settings: Settings, hidden_size: int, *, adapter: bool) -> float:
    """Return the peak: ``learning_rate`` if it is set, else by the rule, times ``learning_rate_multiplier``."""
    rate = settings.learning_rate or (
        PEAKS[settings.learns] * math.sqrt(WIDTH / max(hidden_size, 1)) * (1 if adapter else ALL_WEIGHTS)
    )
    return rate * settings.learning_rate_multiplier


def warmup_steps(settings: Settings, total: int) -> int:
    """Return the steps over which the rate rises: ``warmup``, which below 1 is a share of ``total``, rounded down."""
    return int(settings.warmup * total if settings.warmup < 1 else settings.warmup)


def scheduled(settings: Settings, step: int, *, peak: float, total: int) -> float:
    """Return the learning rate of a step of a training with ``total`` steps."""
    warmup = warmup_steps(settings, total)
    if settings.schedule == "constant":
        return schedules.constant(step, peak=peak, warmup=warmup)
    if settings.schedule == "wsd":
        return schedules.wsd(step, peak=peak, total=total, decay=max(1, total // 10), warmup=warmup)
    schedule = schedules.linear if settings.schedule == "linear" else schedules.cosine
    return schedule(step, peak=peak, total=total, warmup=warmup)
