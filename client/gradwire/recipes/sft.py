"""Supervised fine-tuning: learn what the assistant writes in conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.settings import RowSettings, loss_arguments, setting
from gradwire.recipes.supervised import train_rows


@dataclass
class SFT(RowSettings):
    """Supervised fine-tuning on conversations, or on prompts with completions."""

    folder: str = setting("runs/sft", "metrics, checkpoints' positions and the report; a rerun continues there")
    train_on: Literal["assistant", "last", "all"] = setting(
        "assistant", "assistant: all that it writes; last: its last message; all: every token"
    )
    loss: dict[str, Any] = loss_arguments("causal_lm")


async def train(settings: SFT, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    return await train_rows(
        settings, data.conversations, lambda tokens, rows: tokens.rows(rows, settings.train_on), "causal_lm",
        settings.loss, launch=launch,
    )  # fmt: skip
