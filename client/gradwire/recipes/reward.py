"""A reward model: score the better of two answers higher than the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import Settings, setting
from gradwire.recipes.tokens import Tokens
from gradwire.recipes.training import open_training


@dataclass
class Reward(Settings):
    """A reward model from pairs of answers (Bradley and Terry 1952)."""

    folder: str = setting("runs/reward", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str = setting("preferences.jsonl", "a file or data set with prompt, chosen and rejected")
    loss: dict[str, Any] = setting({}, "arguments of reward_modeling: see docs/losses.md")


async def train(settings: Reward, *, dry_run: bool = False) -> Estimate | None:
    """Run the training, or only estimate it."""
    kept, held_out = rows_of(data.preferences, settings)
    batches = kept.batches(settings.batch_size, seed=settings.seed)
    async with open_training(settings, head="reward", dry_run=dry_run) as training:
        tokens = Tokens(training.service, training.model, settings.max_tokens)

        async def pairs(batch: Sequence[data.Preference]) -> list[dict[str, Any]]:
            ids = ("chosen_input_ids", "rejected_input_ids")
            return [{name: row[name] for name in ids} for row in await tokens.pairs(batch)]

        async def loss(batch: Sequence[data.Preference]) -> Any:
            return training.run.forward_backward(await pairs(batch), "reward_modeling", settings.loss)

        async def evaluate() -> dict[str, float]:
            found = await pairs(list(held_out))
            return dict((await training.run.forward(found, "reward_modeling", settings.loss, outputs=())).metrics)

        if dry_run:
            return await training.estimate(batches, (1.0, loss), held_out=len(held_out))
        async for step, batch in training.steps(batches, evaluate if held_out else None):
            await training.update(step, await loss(batch))
    return None
