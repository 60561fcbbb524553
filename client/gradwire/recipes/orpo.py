"""Odds ratio preference optimisation: learn the better answer, and its odds over the worse one."""

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
class ORPO(RowSettings):
    """ORPO on pairs of answers, without a reference (Hong et al. 2024)."""

    learns = "preferences"

    folder: str = setting("runs/orpo", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str | list[Any] = setting("preferences.jsonl", "a file or data set with prompt, chosen and rejected")
    loss: dict[str, Any] = loss_arguments("orpo", ", such as beta")


async def train(settings: ORPO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_rows(settings, data.preferences, RowEncoder.pairs, "orpo", settings.loss, launch=launch)
