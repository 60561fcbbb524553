"""Proximal policy optimisation with a learned value, on problems with a checkable result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.rl import RLSettings, train_with
from gradwire.recipes.settings import loss_arguments, setting
from gradwire.rl import PPOAlgorithm

LOSS = {"gae_lambda": 1.0, "entropy_coef": 0.0}
"""Arguments of the loss where the settings have none. One reward at the end of an answer reaches all of its tokens, and
nothing else is learned, as in OpenRLHF and verl: with 0.95 a token 60 before the end got a twentieth of it."""


@dataclass
class PPO(RLSettings):
    """PPO on problems with a checkable answer (Schulman et al. 2017)."""

    folder: str = setting("runs/ppo", "metrics, checkpoints' positions and the report; a rerun continues there")
    answers: int = setting(4, "answers to each problem")
    passes: int = setting(4, "optimizer steps on the answers of an iteration, each on all of them")
    loss: dict[str, Any] = loss_arguments("enhanced_ppo", "; of them gae_lambda is 1 and entropy_coef 0 by default")


async def train(settings: PPO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_with(
        settings, PPOAlgorithm, group_size=settings.answers, passes=settings.passes, loss=LOSS, head="value",
        launch=launch,
    )  # fmt: skip
