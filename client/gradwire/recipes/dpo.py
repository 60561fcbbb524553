"""Direct preference optimisation: prefer the better of two answers, relative to the model at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.runs import start_reference
from gradwire.recipes.settings import RowSettings, SettingsError, loss_arguments, setting
from gradwire.recipes.supervised import train_rows
from gradwire.recipes.tokens import RowEncoder


@dataclass
class DPO(RowSettings):
    """Direct preference optimisation on pairs of answers (Rafailov et al. 2023)."""

    learns = "preferences"

    folder: str = setting("runs/dpo", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str | list[Any] = setting("preferences.jsonl", "a file or data set with prompt, chosen and rejected")
    beta: float = setting(0.1, "strength of the pull to the reference")
    reference: str = setting("start", "start: the model as the training begins; base; a checkpoint; or a served model")
    loss: dict[str, Any] = loss_arguments("dpo", ", such as loss_type")

    def check(self) -> None:
        super().check()
        if self.reference == "base" and not self.lora_rank:
            raise SettingsError("reference is base, which is the model without its adapter: name a model, or use LoRA")


async def train(settings: DPO, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    kwargs = {"beta": settings.beta, "reference_model": start_reference(settings, settings.reference), **settings.loss}
    return await train_rows(settings, data.preferences, RowEncoder.pairs, "dpo", kwargs, launch=launch)
