"""Learning rates of recipes: the peak, and how it is reached and left."""

from __future__ import annotations

import math

from gradwire import schedules
from gradwire.recipes.settings import Settings


def learning_rate(settings: Settings, num_parameters: int) -> float:
    """The peak: as set, or 1e-4 for an adapter of a model of 0.6 billion parameters, more for a smaller one.

    It falls with the square root of a model's width, which grows with the cube root of its size. All weights take a
    tenth.
    """
    if settings.learning_rate:
        return settings.learning_rate
    return (1e-4 if settings.lora_rank else 1e-5) * math.pow(6e8 / max(num_parameters, 1), 1 / 6)


def scheduled(settings: Settings, step: int, *, peak: float, total: int) -> float:
    """Return the learning rate of a step of a training with ``total`` steps."""
    if settings.schedule == "constant":
        return schedules.constant(step, peak=peak, warmup=settings.warmup)
    if settings.schedule == "wsd":
        return schedules.wsd(step, peak=peak, total=total, decay=max(1, total // 10), warmup=settings.warmup)
    schedule = schedules.linear if settings.schedule == "linear" else schedules.cosine
    return schedule(step, peak=peak, total=total, warmup=settings.warmup)
