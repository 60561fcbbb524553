"""Policy gradients with the mean reward of a problem's other answers as the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.rl import RLSettings, check_group, train_with
from gradwire.recipes.settings import loss_arguments, setting
from gradwire.rl import REINFORCEAlgorithm


@dataclass
class RLOO(RLSettings):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024)."""

    folder: str = setting("runs/rloo", "metrics, checkpoints' positions and the report; a rerun continues there")
    group_size: int = setting(8, "answers to each problem")
    loss: dict[str, Any] = loss_arguments("importance_sampling")

    def check(self) -> None:
        super().check()
        check_group(self.group_size, {})


async def train(settings: RLOO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_with(settings, REINFORCEAlgorithm, group_size=settings.group_size, launch=launch)
