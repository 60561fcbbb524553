"""A reward model: score the better of two answers higher than the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.settings import RowSettings, loss_arguments, setting
from gradwire.recipes.supervised import train_rows
from gradwire.recipes.tokens import RowEncoder


@dataclass
class Reward(RowSettings):
    """A reward model from pairs of answers (Bradley and Terry 1952)."""

    learns = "scores"

    folder: str = setting("runs/reward", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str | list[Any] = setting(
        "preferences.jsonl", "a file or data set with prompt, chosen and rejected; also margin"
    )
    loss: dict[str, Any] = loss_arguments("reward_modeling")


async def train(settings: Reward, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""

    async def encode(tokens: RowEncoder, rows: Sequence[data.Preference]) -> list[dict[str, Any]]:
        ids = ("chosen_input_ids", "rejected_input_ids")
        pairs = [{name: row[name] for name in ids} for row in await tokens.pairs(rows, margins=True)]
        if any(each.margin for each in rows):
            return [pair | {"margin": each.margin} for pair, each in zip(pairs, rows)]
        return pairs

    return await train_rows(
        settings, data.preferences, encode, "reward_modeling", settings.loss, head="reward", launch=launch
    )
