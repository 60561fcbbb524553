"""Supervised fine-tuning: learn what the assistant writes in conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import Settings, SettingsError, setting
from gradwire.recipes.tokens import Tokens
from gradwire.recipes.training import open_training


@dataclass
class SFT(Settings):
    """Supervised fine-tuning on conversations, or on prompts with completions."""

    folder: str = setting("runs/sft", "metrics, checkpoints' positions and the report; a rerun continues there")
    train_on: str = setting("assistant", "assistant: all that it writes; last: its last message; all: every token")
    loss: dict[str, Any] = setting({}, "arguments of causal_lm: see docs/losses.md")

    def check(self) -> None:
        super().check()
        if self.train_on not in ("assistant", "last", "all"):
            raise SettingsError(f"train_on is {self.train_on!r}; it must be one of assistant, last, all")


async def train(settings: SFT, *, dry_run: bool = False) -> Estimate | None:
    """Run the training, or only estimate it."""
    kept, held_out = rows_of(data.conversations, settings)
    batches = kept.batches(settings.batch_size, seed=settings.seed)
    async with open_training(settings, dry_run=dry_run) as training:
        tokens = Tokens(training.service, training.model, settings.max_tokens)

        async def loss(batch: Sequence[data.Conversation]) -> Any:
            found = await tokens.rows(batch, settings.train_on)
            return training.run.forward_backward(found, "causal_lm", settings.loss)

        async def evaluate() -> dict[str, float]:
            found = await tokens.rows(list(held_out), settings.train_on)
            return dict((await training.run.forward(found, "causal_lm", settings.loss, outputs=())).metrics)

        if dry_run:
            return await training.estimate(batches, (1.0, loss), held_out=len(held_out))
        async for step, batch in training.steps(batches, evaluate if held_out else None):
            await training.update(step, await loss(batch))
    return None
