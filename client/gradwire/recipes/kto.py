"""Kahneman-Tversky optimisation: raise good answers and lower bad ones, each rated alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.runs import start_reference
from gradwire.recipes.settings import RowSettings, loss_arguments, setting
from gradwire.recipes.supervised import train_rows
from gradwire.recipes.tokens import RowEncoder


@dataclass
class KTO(RowSettings):
    """KTO on single answers, each labelled good or bad (Ethayarajh et al. 2024)."""

    learns = "preferences"

    folder: str = setting("runs/kto", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str | list[Any] = setting("ratings.jsonl", "a file or data set with prompt, completion and label")
    beta: float = setting(0.1, "strength of the pull to the reference")
    reference: str = setting("start", "start: the model as the training begins; base; a checkpoint; or a served model")
    loss: dict[str, Any] = loss_arguments("kto", ", such as desirable_weight")


async def train(settings: KTO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    kwargs = {"beta": settings.beta, "reference_model": start_reference(settings, settings.reference), **settings.loss}
    return await train_rows(settings, data.ratings, RowEncoder.ratings, "kto", kwargs, launch=launch)
