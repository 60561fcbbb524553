"""Distillation: learn a teacher's distributions, on given conversations and on the student's own answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.settings import RowSettings, SettingsError, loss_arguments, setting
from gradwire.recipes.supervised import train_rows
from gradwire.recipes.tokens import RowEncoder
from gradwire.recipes.training import Training


@dataclass
class Distill(RowSettings):
    """Distillation of a teacher with the same tokenizer (generalised knowledge distillation, Agarwal et al. 2023)."""

    folder: str = setting("runs/distill", "metrics, checkpoints' positions and the report; a rerun continues there")
    teacher: str = setting("", "a model that the server at address has, or a checkpoint RUN_ID/NAME that you may read")
    own_answers: float = setting(0.5, "share of the batches that hold the student's own answers")
    answer_tokens: int = setting(128, "tokens of such an answer at most")
    beta: float = setting(0.5, "0: KL from teacher to student; 1: from student to teacher; between: Jensen-Shannon")
    loss: dict[str, Any] = loss_arguments("gkd")

    def check(self) -> None:
        super().check()
        if not self.teacher:
            raise SettingsError("teacher is empty; name a model of the server, or a checkpoint RUN_ID/NAME")
        if not 0 <= self.own_answers <= 1:
            raise SettingsError(f"own_answers is {self.own_answers}; it must be between 0 and 1")


async def train(settings: Distill, launch: Launch = ALONE) -> Estimate | None:
    """Run the training, or only estimate it."""
    kwargs = {"beta": settings.beta, "reference_model": settings.teacher, **settings.loss}

    async def answered(
        training: Training, tokens: RowEncoder, batch: Sequence[data.Conversation], step: int
    ) -> list[dict[str, Any]] | None:
        """Sample the student's own answers to the prompts of a batch; a step below 0 is an estimate's."""
        if step >= 0 and random.Random(f"{settings.seed} {step}").random() >= settings.own_answers:
            return None
        prompts = await tokens.fitting(batch, lambda rows: tokens.prompts(rows, settings.answer_tokens))
        if not prompts:
            return []
        seed = settings.seed + max(step, 0)
        sampled = await training.run.sample(prompts, max_tokens=settings.answer_tokens, seed=seed)
        return [
            {
                "input_ids": [*prompt, *answers[0].token_ids],
                "loss_mask": [0] * len(prompt) + [1] * len(answers[0].token_ids),
            }
            for prompt, answers in zip(prompts, sampled.samples)
        ]

    return await train_rows(
        settings, data.conversations, RowEncoder.rows, "gkd", kwargs, sampled=answered,
        sampled_share=settings.own_answers, launch=launch,
    )  # fmt: skip
