"""Proximal policy optimisation with a learned value, on problems with a checkable result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.recipes.estimate import Estimate
from gradwire.recipes.rl import RLSettings, train_with
from gradwire.recipes.settings import setting
from gradwire.rl import PPOAlgorithm


@dataclass
class PPO(RLSettings):
    """PPO on problems with a checkable answer (Schulman et al. 2017)."""

    folder: str = setting("runs/ppo", "metrics, checkpoints' positions and the report; a rerun continues there")
    answers: int = setting(4, "answers to each problem")
    loss: dict[str, Any] = setting({}, "arguments of ppo: see docs/losses.md")


async def train(settings: PPO, *, dry_run: bool = False) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_with(settings, PPOAlgorithm, group_size=settings.answers, head="value", dry_run=dry_run)
