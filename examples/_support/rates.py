"""The learning rate of every step: linear warm-up, then a cosine."""

from __future__ import annotations

import math

WARMUP = 20


def schedule(peak: float, steps: int, warmup: int = WARMUP) -> list[float]:
    """Linear warm-up, then a cosine down to a twentieth."""
    return [
        peak * min(1, (step + 1) / max(1, warmup)) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for step in range(steps)
    ]


def rate_text(peak: float, warmup: int = WARMUP) -> str:
    began = f"after {warmup} steps of linear warm-up" if warmup else "from the first step"
    return f"{peak:g} {began}, then a cosine down to a twentieth"
