"""Simple preference optimisation: prefer the better of two answers by their mean log-probabilities."""

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
class SimPO(RowSettings):
    """SimPO on pairs of answers, without a reference (Meng et al. 2024)."""

    learns = "preferences"

    folder: str = setting("runs/simpo", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str | list[Any] = setting("preferences.jsonl", "a file or data set with prompt, chosen and rejected")
    loss: dict[str, Any] = loss_arguments("simpo", ", such as beta")


async def train(settings: SimPO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_rows(settings, data.preferences, RowEncoder.pairs, "simpo", settings.loss, launch=launch)
