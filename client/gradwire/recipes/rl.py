"""Shared parts of PPO and GRPO: problems, a grader, the algorithm of ``gradwire.rl`` with its checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import gradwire
from gradwire import data
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.observing import OBSERVER, Observer
from gradwire.recipes.report import write_report
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import Settings, SettingsError, setting
from gradwire.recipes.training import loggers_of, open_folder, open_service, save_state, warn_of_warmup
from gradwire.rl import Algorithm, AlgorithmConfig, last_number, math_answer, multiple_choice
from gradwire.rl.datasets import final_answer
from gradwire.rl.rewards.graders import GraderError, grader_of
from gradwire.rl.types import Message, Task

GRADERS: Mapping[str, Callable[[], Any]] = {
    "last_number": last_number,
    "math_answer": math_answer,
    "multiple_choice": multiple_choice,
}


@dataclass
class RLSettings(Settings):
    """Settings of trainings on rewards."""

    data: str = setting("train.jsonl", "a file or data set of problems with an answer")
    learning_rate: float = setting(1e-5, "at its peak; warm-up applies, schedule does not")
    schedule: str = setting("constant", "constant, the only one here")
    optimizer: str = setting("adamw", "adamw, the only one here")
    weight_decay: float = setting(0.0, "decoupled, of all weights")
    batch_size: int = setting(8, "problems of an iteration")
    max_steps: int = setting(0, "iterations at most; 0: as the epochs have")
    answer_tokens: int = setting(256, "tokens of an answer at most")
    temperature: float = setting(1.0, "of sampling")
    grader: str = setting("last_number", "last_number, math_answer (symbolic; needs gradwire[math]), multiple_choice")
    grading: dict[str, Any] = setting({}, "a grader of OpenAI's form, over each row's columns; in place of grader")
    eval_problems: int = setting(64, "held-out problems of an evaluation at most; answered greedily")

    def check(self) -> None:
        super().check()
        if self.grader not in GRADERS:
            raise SettingsError(f"grader is {self.grader!r}; it must be one of {', '.join(GRADERS)}")
        if self.grading:
            try:
                grader_of(self.grading)
            except GraderError as error:
                raise SettingsError(f"grading: {error}") from None
        if self.schedule != "constant":
            raise SettingsError("schedule is set, and must be constant here")
        if self.optimizer != "adamw":
            raise SettingsError("optimizer is set, and must be adamw here")


async def train_with(
    settings: RLSettings,
    algorithm: type[Algorithm],
    *,
    group_size: int,
    head: Any = None,
    dry_run: bool = False,
) -> Estimate | None:
    """Train a run with an algorithm, from the state in its folder."""
    kept, held_out = rows_of(_items if settings.grading else data.prompts, settings)
    task = _graded_task if settings.grading else _task
    tasks, problems = [task(each) for each in kept], [task(each) for each in held_out[: settings.eval_problems]]
    reward = grader_of(settings.grading) if settings.grading else GRADERS[settings.grader]()
    per_epoch = -(-len(tasks) // settings.batch_size)
    total = settings.max_steps or per_epoch * settings.epochs
    folder = Path(settings.folder)
    config = AlgorithmConfig(
        batch_size=settings.batch_size, group_size=group_size, learning_rate=settings.learning_rate,
        warmup_iterations=settings.warmup, weight_decay=settings.weight_decay, loss_kwargs=settings.loss,
        max_tokens=settings.answer_tokens, temperature=settings.temperature, context_tokens=settings.max_tokens,
        seed=settings.seed, eval_every=0 if dry_run or not problems else settings.eval_every,
        save_every=0 if dry_run else settings.save_every or per_epoch, checkpoint_dir=None if dry_run else folder,
    )  # fmt: skip
    known = {} if dry_run else open_folder(folder / "run.json", settings)
    warn_of_warmup(settings, total)
    async with open_service(settings) as (service, model):
        if known:
            run = service.get_training_client(known["run_id"])
        else:
            run = await service.create_run(
                model.name, lora=settings.lora_rank or None, head=head, seed=settings.seed, kind="rl", name=folder.name
            )
            if not dry_run:
                save_state(folder / "run.json", {"run_id": run.run_id}, settings)
        loggers = [] if dry_run else loggers_of(settings)
        arguments = (service, run, tasks, reward, config)
        async with algorithm(*arguments, eval_tasks=problems, loggers=loggers) as training:
            if dry_run:
                try:
                    return await _estimate(settings, training, model, len(tasks), total)
                finally:
                    await service.delete_run(run.run_id)
            (OBSERVER.get() or Observer()).began(run.run_id, total)
            done = await training.resume()
            if known:
                print(f"{folder}: going on at iteration {done}", flush=True)
            if not done:
                await training.save_checkpoint()
            await training.train(total - done)
            await training.save_checkpoint()
    await asyncio.to_thread(write_report, folder, type(settings).__name__, asdict(settings))
    return None


async def _estimate(
    settings: RLSettings, training: Algorithm, model: gradwire.ModelInfo, tasks: int, total: int
) -> Estimate:
    """Measure the second iteration, as what happens only once is in the first, and an evaluation."""
    await training.train(1, progress_bar=False)
    before, began = (await training.run.info()).num_tokens, time.monotonic()
    await training.train(1, progress_bar=False)
    seconds, info = (time.monotonic() - began) * total, await training.run.info()
    if settings.eval_every and training.eval_tasks:
        began = time.monotonic()
        await training.evaluate()
        seconds += (time.monotonic() - began) * (total // settings.eval_every)
    tokens = (info.num_tokens - before) * total
    return Estimate.of(settings, tasks, tokens, total, model, info.num_trainable_parameters, seconds)


def _task(row: data.Prompt) -> Task:
    return Task(cast("tuple[Message, ...]", row.prompt), final_answer(str(row.answer)))


def _items(source: Any, mapping: Mapping[str, Any], **options: Any) -> data.Dataset[data.Prompt]:
    """Prompts whose answer is the whole row, which graders of OpenAI's form name as ``item``."""
    return data.prompts(source, mapping={**mapping, "answer": dict}, **options)


def _graded_task(row: data.Prompt) -> Task:
    return Task(cast("tuple[Message, ...]", row.prompt), row.answer)
