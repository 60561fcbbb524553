"""Direct preference optimisation: prefer the better of two answers, relative to the model at the start."""

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
class DPO(Settings):
    """Direct preference optimisation on pairs of answers (Rafailov et al. 2023)."""

    folder: str = setting("runs/dpo", "metrics, checkpoints' positions and the report; a rerun continues there")
    data: str = setting("preferences.jsonl", "a file or data set with prompt, chosen and rejected")
    learning_rate: float = setting(5e-5, "at its peak")
    beta: float = setting(0.1, "strength of the pull to the reference")
    reference: str = setting("base", "base: the model without its adapter; or a checkpoint, or a model of the server")
    loss: dict[str, Any] = setting({}, "further arguments of dpo, such as loss_type: see docs/losses.md")

    def check(self) -> None:
        super().check()
        if self.reference == "base" and not self.lora_rank:
            raise SettingsError("reference is base, which is the model without its adapter: name a model, or use LoRA")


async def train(settings: DPO, *, dry_run: bool = False) -> Estimate | None:
    """Run the training, or only estimate it."""
    kept, held_out = rows_of(data.preferences, settings)
    batches = kept.batches(settings.batch_size, seed=settings.seed)
    kwargs = {"beta": settings.beta, "reference_model": settings.reference, **settings.loss}
    async with open_training(settings, dry_run=dry_run) as training:
        tokens = Tokens(training.service, training.model, settings.max_tokens)

        async def loss(batch: Sequence[data.Preference]) -> Any:
            return training.run.forward_backward(await tokens.pairs(batch), "dpo", kwargs)

        async def evaluate() -> dict[str, float]:
            found = await tokens.pairs(list(held_out))
            return dict((await training.run.forward(found, "dpo", kwargs, outputs=())).metrics)

        if dry_run:
            return await training.estimate(batches, (1.0, loss), held_out=len(held_out))
        async for step, batch in training.steps(batches, evaluate if held_out else None):
            await training.update(step, await loss(batch))
    return None
