"""Distillation: learn a teacher's distributions, on given conversations and on the student's own answers."""

from __future__ import annotations

import random
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
class Distill(Settings):
    """Distillation of a teacher with the same tokenizer (generalised knowledge distillation, Agarwal et al. 2023)."""

    folder: str = setting("runs/distill", "metrics, checkpoints' positions and the report; a rerun continues there")
    teacher: str = setting("", "a model of the server, or a checkpoint RUN_ID/NAME that you may read")
    own_answers: float = setting(0.5, "share of the batches that hold the student's own answers")
    answer_tokens: int = setting(128, "tokens of such an answer at most")
    beta: float = setting(0.5, "0: KL from teacher to student; 1: from student to teacher; between: Jensen-Shannon")
    loss: dict[str, Any] = setting({}, "further arguments of gkd: see docs/losses.md")

    def check(self) -> None:
        super().check()
        if not self.teacher:
            raise SettingsError("teacher is empty; name a model of the server, or a checkpoint RUN_ID/NAME")
        if not 0 <= self.own_answers <= 1:
            raise SettingsError(f"own_answers is {self.own_answers}; it must be between 0 and 1")


async def train(settings: Distill, *, dry_run: bool = False) -> Estimate | None:
    """Run the training, or only estimate it."""
    kept, held_out = rows_of(data.conversations, settings)
    batches = kept.batches(settings.batch_size, seed=settings.seed)
    kwargs = {"beta": settings.beta, "reference_model": settings.teacher, **settings.loss}
    async with open_training(settings, dry_run=dry_run) as training:
        tokens = Tokens(training.service, training.model, settings.max_tokens)

        async def answered(batch: Sequence[data.Conversation], step: int) -> list[dict[str, Any]]:
            """Sample the student's own answers to the prompts of a batch."""
            prompts = await tokens.prompts(batch, settings.answer_tokens)
            sampled = await training.run.sample(prompts, max_tokens=settings.answer_tokens, seed=settings.seed + step)
            return [
                {
                    "input_ids": [*prompt, *answers[0].token_ids],
                    "loss_mask": [0] * len(prompt) + [1] * len(answers[0].token_ids),
                }
                for prompt, answers in zip(prompts, sampled.samples)
            ]

        async def on_given(batch: Sequence[data.Conversation]) -> Any:
            return training.run.forward_backward(await tokens.rows(batch), "gkd", kwargs)

        async def on_own(batch: Sequence[data.Conversation], step: int = 0) -> Any:
            return training.run.forward_backward(await answered(batch, step), "gkd", kwargs)

        async def evaluate() -> dict[str, float]:
            found = await tokens.rows(list(held_out))
            return dict((await training.run.forward(found, "gkd", kwargs, outputs=())).metrics)

        if dry_run:
            own = settings.own_answers
            return await training.estimate(batches, (own, on_own), (1 - own, on_given), held_out=len(held_out))
        async for step, batch in training.steps(batches, evaluate if held_out else None):
            own_answers = random.Random(f"{settings.seed} {step}").random() < settings.own_answers
            await training.update(step, await (on_own(batch, step) if own_answers else on_given(batch)))
    return None
