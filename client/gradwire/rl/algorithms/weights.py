"""The run's weights in whatever samples, and how far behind samples are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.rl.types import Trajectory


def can_update(inference: Any, run: Any) -> bool:
    """Whether it can be given the run's weights; a sampler of the user's that says nothing of it cannot."""
    return bool(getattr(inference, "can_update", lambda run: False)(run))


def check_updatable(inference: Any, run: Any) -> None:
    """Refuses a sampler whose weights would stay as they are.

    Raises:
        ValueError: saying what to do.
    """
    if not can_update(inference, run):
        raise ValueError(
            f"{type(inference).__name__} cannot be given the weights of this run: it would sample with the first "
            "policy for ever, and training would go wrong without a word. Make it updatable (an endpoint: "
            'OpenAIInference(..., weights="adapter")), or say allow_stale=True where that is meant'
        )


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Optimizer steps between the policy that wrote a token and the one that is trained on it: mean and maximum.

    Args:
        trajectories: what is trained on.
        version: optimizer steps that the trained policy has taken.
    """
    steps = [step for each in trajectories for step in each.steps if len(step.response_ids)]
    if not steps:
        return {}
    ages = np.array([version - step.policy_version for step in steps], np.float64)
    tokens = [len(step.response_ids) for step in steps]
    return {"train/staleness": float(np.average(ages, weights=tokens)), "train/staleness_max": float(ages.max())}
