"""Send the run's weights to the sampler, let it sleep while the policy trains, and measure how stale samples are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from gradwire.rl.metrics import Max, Mean, Metric
from gradwire.rl.types import Trajectory


def can_update(inference: Any, run: Any) -> bool:
    """Whether a sampler can receive the run's weights; a custom sampler without a declaration cannot."""
    return bool(getattr(inference, "can_update", lambda run: False)(run))


def check_updatable(inference: Any, run: Any) -> None:
    """Refuse a sampler that cannot receive weights.

    Raises:
        ValueError: The sampler cannot; the message says what to do.
    """
    if not can_update(inference, run):
        raise ValueError(
            f"{type(inference).__name__} cannot receive the weights of this run: it would keep sampling from the first "
            "policy, and training would go wrong silently. Make it updatable (for an endpoint: "
            'OpenAIInference(..., weights="adapter")), or pass allow_stale=True if this is intended'
        )


@asynccontextmanager
async def asleep(inference: Any) -> AsyncIterator[None]:
    """Let a sampler that shares the trainer's GPU sleep within the body, unless new weights wake it there."""
    if not getattr(inference, "sleeps", False):
        yield
        return
    await inference.sleep()
    try:
        yield
    finally:
        await inference.wake()


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, Metric]:
    """Optimizer steps between the policy that wrote a token and the trained policy: mean and maximum.

    Args:
        trajectories: The trajectories trained on.
        version: Number of optimizer steps that the trained policy has taken.
    """
    ages = [
        version - (np.full(len(step.response_ids), step.policy_version) if written is None else written)
        for each in trajectories
        for step in each.steps
        for written in [step.token_versions]
        if len(step.response_ids)
    ]
    if not ages:
        return {}
    of_tokens = np.concatenate(ages)
    return {"train/staleness": Mean.of(of_tokens), "train/staleness_max": Max(float(of_tokens.max()))}
