"""Learning rates as functions of the step, counted from 0.

During the first ``warmup`` steps the rate rises linearly to ``peak``, which the step after them has. From ``total`` on
it stays at ``final``.
"""

from __future__ import annotations

import math


def constant(step: int, *, peak: float, warmup: int = 0) -> float:
    """Return the peak, after a linear warm-up."""
    return peak * _risen(step, warmup)


def linear(step: int, *, peak: float, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """Decay linearly from the peak to ``final`` at step ``total``."""
    return _risen(step, warmup) * (final + (peak - final) * (1 - _passed(step, warmup, total)))


def cosine(step: int, *, peak: float, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """Decay along half a cosine from the peak to ``final`` at step ``total`` (Loshchilov and Hutter 2017)."""
    return _risen(step, warmup) * (
        final + (peak - final) * 0.5 * (1 + math.cos(math.pi * _passed(step, warmup, total)))
    )


def wsd(step: int, *, peak: float, total: int, decay: int, warmup: int = 0, final: float = 0.0) -> float:
    """Warm up, stay at the peak, and decay linearly in the last ``decay`` steps (Hu et al. 2024, arXiv 2404.06395)."""
    return _risen(step, warmup) * (final + (peak - final) * (1 - _passed(step, max(warmup, total - decay), total)))


def _risen(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1)) if warmup else 1.0


def _passed(step: int, start: int, end: int) -> float:
    """Share of the way from ``start`` to ``end`` that lies behind."""
    return min(max(step - start, 0) / max(end - start, 1), 1.0)
