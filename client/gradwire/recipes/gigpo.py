"""Group-in-group policy optimisation: episodes of several turns, whose steps are judged within equal states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.rl import RLSettings, check_group, train_with
from gradwire.recipes.settings import SettingsError, loss_arguments, setting
from gradwire.rl import GiGPOAlgorithm


@dataclass
class GiGPO(RLSettings):
    """GiGPO in an environment of several turns (Feng et al. 2025)."""

    folder: str = setting("runs/gigpo", "metrics, checkpoints' positions and the report; a rerun continues there")
    reward: str | dict[str, float] = setting(
        "environment", "environment: what it gave itself; or FILE.py:FUNCTION, or a mapping of rewards to weights"
    )
    group_size: int = setting(8, "episodes of each problem")
    omega: float = setting(1.0, "weight of the step level; 0 is GRPO over episodes")
    gamma: float = setting(0.95, "discount of a step")
    loss: dict[str, Any] = loss_arguments("gigpo")

    def check(self) -> None:
        super().check()
        if not self.environment:
            raise SettingsError("environment is empty; gigpo compares steps of several turns: name one, or use grpo")
        check_group(self.group_size, self.loss)
        if not 0 <= self.gamma <= 1:
            raise SettingsError(f"gamma is {self.gamma}; it must be from 0 to 1")


async def train(settings: GiGPO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    algorithm = partial(GiGPOAlgorithm, omega=settings.omega, gamma=settings.gamma)
    return await train_with(settings, algorithm, group_size=settings.group_size, launch=launch)
