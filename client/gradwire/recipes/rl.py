"""Shared parts of trainings on rewards: problems, reward, environment, the algorithm of ``gradwire.rl``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, cast

import gradwire
from gradwire import data
from gradwire.data.stored import Viewed
from gradwire.loop.best import Best
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.folder import facts_of
from gradwire.recipes.launch import Launch
from gradwire.recipes.own_code import (
    AGENT,
    REWARDS,
    agent_of,
    check_reward,
    environment_of,
    reward_models,
    reward_of,
    task_of,
    trained_rewards,
)
from gradwire.recipes.rates import scheduled
from gradwire.recipes.report import ANSWERS
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import Schedule, Settings, SettingsError, setting
from gradwire.recipes.tokens import RowEncoder, RowRefusedError
from gradwire.recipes.training import Training, open_training
from gradwire.rl import Algorithm, AlgorithmConfig, RunRecorder, TrajectoryRecorder
from gradwire.rl.environments import Environment, GroupBuilder
from gradwire.rl.recording import Recorders
from gradwire.rl.rewards import environment_reward
from gradwire.rl.rewards.graders import GraderError, ServiceJudge, grader_of
from gradwire.rl.types import Message, Task

COMPARING = {*REWARDS} - {"environment"}
"""Rewards that compare with a problem's answer."""
KEPT_ANSWERS = 8
"""Answers of each iteration that are kept in the folder, those to the first problems."""
RENDERED = 1_024
"""Prompts that the template writes at once."""


@dataclass
class RLSettings(Settings):
    """Settings of trainings on rewards."""

    learns = "policy"

    data: str | list[Any] = setting(
        "train.jsonl", "a file or data set of problems, with answers if the reward compares with them"
    )
    schedule: Schedule = setting("constant", "constant, linear, cosine or wsd")
    warmup: float = setting(0.0, "iterations over which the learning rate rises; below 1: a share of them")
    weight_decay: float = setting(0.0, "of AdamW, decoupled, of all weights")
    batch_size: int = setting(8, "problems of an iteration")
    max_steps: int = setting(0, "iterations at most; 0: as the epochs have")
    answer_tokens: int = setting(256, "tokens of an answer, or of a turn, at most")
    temperature: float = setting(1.0, "of sampling")
    reward: str | dict[str, float] = setting(
        "last_number",
        "last_number, math_answer (symbolic; needs gradwire[math]), multiple_choice, environment, FILE.py:FUNCTION, "
        "the folder of a training by reward, or a mapping of these to weights",
    )
    missing_eos_penalty: float = setting(1.0, "taken off a reward model's score of an answer that was cut")
    grading: dict[str, Any] = setting({}, "a grader of OpenAI's form, over each row's columns; in place of reward")
    environment: str = setting(
        "", "FILE.py:NAME, MODULE:NAME, an entry point, or agent: a program; empty: one answer to each problem"
    )
    command: str | list[Any] = setting("", "of environment agent: the program, {prompt} stands for the problem")
    environment_args: dict[str, Any] = setting({}, "what the environment is made with")
    turns: int = setting(16, "answers of an episode at most, if the environment does not end it before")
    on_failure: Literal["stop", "warn"] = setting("stop", "stop, or warn: what to do when every answer failed")
    record_every: int = setting(1, "iterations between those whose answers the console shows; 0: none")
    patience: int = setting(0, "evaluations without a better success after which the training ends; 0: never")
    eval_problems: int = setting(64, "held-out problems of an evaluation at most; answered greedily")

    @property
    def starts_from(self) -> str:
        """The reward model's server is used where nothing else says which."""
        folders = [name for name in trained_rewards(self.reward) if not name.startswith("run-")]
        return self.init_from or next(iter(folders), "")

    def check(self) -> None:
        super().check()
        check_reward(self.reward)
        if self.environment_args and not self.environment:
            raise SettingsError("environment_args is set, and environment is empty")
        if bool(self.command) != (self.environment == AGENT):
            raise SettingsError("environment: agent needs a command, and a command needs environment: agent")
        if self.grading:
            try:
                grader_of(self.grading)
            except GraderError as error:
                raise SettingsError(f"grading: {error}") from None


def check_group(size: int, loss: Mapping[str, Any]) -> None:
    """Check that an answer has others of its group to be judged by, unless the loss has another baseline.

    Raises:
        SettingsError: It has none.
    """
    if size < 2 and "baseline" not in loss:
        raise SettingsError("group_size is 1; an answer is judged by the others to its problem: at least 2")


async def train_with(
    settings: RLSettings,
    algorithm: Callable[..., Algorithm],
    *,
    group_size: int,
    passes: int = 1,
    loss: Mapping[str, Any] = MappingProxyType({}),
    head: Any = None,
    launch: Launch,
) -> Estimate | None:
    """Train a run with an algorithm, from the state in its folder; the settings' arguments of the loss override."""
    own_reward = None if settings.grading or trained_rewards(settings.reward) else reward_of(settings.reward)
    if settings.environment == AGENT:
        environment: Environment | GroupBuilder | None = agent_of(
            settings.command, settings.environment_args, own_reward
        )
        own_reward = own_reward and environment_reward()
    else:
        environment = environment_of(settings.environment, settings.environment_args)
    kept, held_out = rows_of(data.prompts, settings)
    async with (
        open_training(settings, head=head, kind="rl", launch=launch) as training,
        reward_models(training.service, settings.reward, settings.missing_eos_penalty) as models,
    ):
        service, model = training.service, training.model
        tokens = RowEncoder(service, model, settings.max_tokens, on_error=settings.on_error)
        tasks: Sequence[Task] = Viewed(kept, lambda row: _task(row, settings))
        if kept.in_memory:  # else a prompt that the template refuses costs its own answers only
            tasks = await _tasks(settings, tokens, kept)
        problems = await _tasks(settings, tokens, held_out[: settings.eval_problems])
        tokens.tell_of_rows()
        if not tasks:
            raise SettingsError(f"data is {settings.data}: no problem could be used")
        per_epoch = -(-len(tasks) // settings.batch_size)
        total = settings.max_steps or per_epoch * settings.epochs
        config = _config(settings, training, group_size, per_epoch, evaluated=bool(problems) and not launch.dry_run)
        config = replace(
            config,
            ppo_epochs=passes,
            loss_kwargs={**loss, **settings.loss},
            **_optimizer(settings, training.peak, total, bool(head)),
        )
        reward = own_reward or (
            grader_of(settings.grading, judge=ServiceJudge(service))
            if settings.grading
            else reward_of(settings.reward, models)
        )
        arguments = (service, training.run, tasks, reward, config)
        more: dict[str, Any] = {"environment": environment, "eval_tasks": problems, "loggers": training.loggers}
        in_folder = TrajectoryRecorder(training.folder / ANSWERS, limit=KEPT_ANSWERS, tokens=False)
        on_server = RunRecorder(training.run, every=settings.record_every)
        shown = [on_server] if settings.record_every and not launch.dry_run else []
        more["recorder"] = Recorders([in_folder, *shown])
        async with algorithm(*arguments, **more) as trained:
            if launch.dry_run:
                return await _estimate(settings, trained, model, len(tasks), total)
            trained.loop.facts = facts_of(settings, launch)
            trained.loop.plan = replace(trained.loop.plan, eval_first=settings.eval_first, keep=settings.keep)
            trained.loop.best = Best("success", settings.patience)
            done = await trained.resume()
            training.begin(total)
            if not done:
                await trained.save_checkpoint()
            await trained.train(total - done)
            await trained.save_checkpoint()
    return None


def _config(
    settings: RLSettings, training: Training, group_size: int, per_epoch: int, *, evaluated: bool
) -> AlgorithmConfig:
    return AlgorithmConfig(
        batch_size=settings.batch_size, group_size=group_size,
        learning_rate=training.peak, weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm, max_tokens=settings.answer_tokens, temperature=settings.temperature,
        context_tokens=settings.max_tokens, max_steps_per_rollout=settings.turns, seed=settings.seed,
        eval_every=settings.eval_every if evaluated else 0,
        save_every=settings.save_every or per_epoch, on_failure=settings.on_failure,
        checkpoint_dir=training.folder,
    )  # fmt: skip


def _optimizer(settings: RLSettings, peak: float, total: int, has_head: bool) -> dict[str, Any]:
    more = {"head_learning_rate": settings.head_learning_rate} if settings.head_learning_rate and has_head else {}
    return {
        "optimizer": settings.optimizer, "optimizer_args": settings.optimizer_args | more,
        "schedule": lambda iteration: scheduled(settings, iteration, peak=peak, total=total),
    }  # fmt: skip


async def _tasks(settings: RLSettings, tokens: RowEncoder, rows: Sequence[data.Prompt]) -> list[Task]:
    """Problems whose prompts the model's template writes, so that no iteration fails by one that it refuses."""

    compared = {*([settings.reward] if isinstance(settings.reward, str) else settings.reward)} & COMPARING

    async def written(part: Sequence[data.Prompt]) -> list[data.Prompt]:
        for index, each in enumerate(part):
            if each.answer is None and compared and not settings.grading:
                reason = f"there is no answer, and the reward {min(compared)} compares with it: write a column answer, "
                raise RowRefusedError(index, reason + "name another with mapping: {answer: COLUMN}, or set reward")
        await tokens.prompts(part, room=0)
        return list(part)

    parts = [rows[start : start + RENDERED] for start in range(0, len(rows), RENDERED)]
    return [_task(each, settings) for part in parts for each in await tokens.fitting(part, written)]


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
    return Estimate.of("adamw", tasks, tokens, total, model, info.num_trainable_parameters, seconds)


def _task(row: data.Prompt, settings: RLSettings) -> Task:
    """A problem; graders of OpenAI's form compare with the whole row, which they name as ``item``."""
    if settings.grading:
        return Task(cast("tuple[Message, ...]", row.prompt), dict(row.columns))
    return task_of(row, settings.reward)
