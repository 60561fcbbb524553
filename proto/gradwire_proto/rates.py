"""The learning rate that is taken where none is given: one rule for recipes, ``gradwire.rl`` and ``optim_step``.

It has three factors: what is learned, the model's width, and whether an adapter or all weights are trained.

* :data:`PEAKS`. That of answers is Tinker's, ``5e-4 * (2000 / hidden_size) ** power``; docs/lora.md has what was
  measured of each.
* The width, with the power 1/2, between Tinker's 0.0775 for Qwen and 0.781 for Llama. At a width of 4,096 an adapter
  has 3.5e-4, where Tinker has 2.9e-4 for Llama and 4.7e-4 for Qwen, and Unsloth 2e-4.
* All weights take a tenth of an adapter's rate (Schulman et al., LoRA Without Regret, 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Learned = Literal["answers", "scores", "preferences", "policy"]
"""The kinds of training that the rule distinguishes."""
PEAKS: Mapping[Learned, float] = {"answers": 5e-4, "scores": 1.5e-4, "preferences": 1.5e-4, "policy": 1e-4}
"""The rate for an adapter of a model that is :data:`WIDTH` wide, by the kind of training."""
WIDTH = 2000
ALL_WEIGHTS = 0.1
"""The rate of all weights, as a share of an adapter's."""


def learning_rate(learned: Learned, hidden_size: int, *, adapter: bool) -> float:
    """Return the rule's rate, of which schedules make a peak."""
    return PEAKS[learned] * math.sqrt(WIDTH / max(hidden_size, 1)) * (1 if adapter else ALL_WEIGHTS)


def learned_by(*, kind: str, head: str) -> Learned:
    """Return what a run is taken to learn if only its kind and its head are known."""
    if kind == "rl" or head == "value":
        return "policy"
    return "scores" if head else "answers"
