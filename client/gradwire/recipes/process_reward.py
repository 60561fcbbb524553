"""A process reward model: judge each step of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.settings import RowSettings, loss_arguments, setting
from gradwire.recipes.supervised import train_rows
from gradwire.recipes.tokens import RowEncoder


@dataclass
class ProcessReward(RowSettings):
    """A process reward model from answers whose steps are labelled right or wrong (Lightman et al. 2023)."""

    learns = "scores"

    folder: str = setting("runs/process_reward", "metrics, positions and the report; a rerun continues there")
    data: str | list[Any] = setting("steps.jsonl", "a file or data set with prompt, completions and labels")
    loss: dict[str, Any] = loss_arguments("token_classification")


async def train(settings: ProcessReward, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_rows(
        settings, data.steps, RowEncoder.steps, "token_classification", settings.loss, head="classification",
        num_labels=2, launch=launch,
    )  # fmt: skip
