"""Learning rates of recipes: how the peak is reached and left."""

from __future__ import annotations

from gradwire_proto import rates

from gradwire import schedules
from gradwire.recipes.settings import Settings


def learning_rate(settings: Settings, hidden_size: int, *, adapter: bool) -> float:
    """Return the peak: ``learning_rate`` if it is set, else by the rule, times ``learning_rate_multiplier``."""
    rate = settings.learning_rate or rates.learning_rate(settings.learns, hidden_size, adapter=adapter)
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
