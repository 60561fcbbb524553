"""Group relative policy optimisation on problems with a checkable result: answers are judged within their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.rl import RLSettings, check_group, train_with
from gradwire.recipes.settings import loss_arguments, setting
from gradwire.rl import GRPOAlgorithm


@dataclass
class GRPO(RLSettings):
    """GRPO on problems with a checkable answer (Shao et al. 2024)."""

    folder: str = setting("runs/grpo", "metrics, checkpoints' positions and the report; a rerun continues there")
    group_size: int = setting(8, "answers to each problem")
    loss: dict[str, Any] = loss_arguments("grpo")

    def check(self) -> None:
        super().check()
        check_group(self.group_size, self.loss)


async def train(settings: GRPO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_with(settings, GRPOAlgorithm, group_size=settings.group_size, launch=launch)
