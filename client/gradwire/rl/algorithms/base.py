"""What the algorithms share: rollouts, rewards, updates, evaluation, checkpoints, one iteration after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from gradwire.errors import GradwireError
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.state import AlgorithmState
from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum, ShuffledCurriculum, Tasks, as_tasks
from gradwire.rl.environments import BaseEnvironment, SimpleTextEnvironment
from gradwire.rl.inference import InferenceModule, RunInference
from gradwire.rl.loggers import JsonlLogger, MetricLogger
from gradwire.rl.progress import Progress
from gradwire.rl.recording import TrajectoryRecorder
from gradwire.rl.replay import ReplayBuffer, written_at
from gradwire.rl.rewards import RewardComputer, RewardFunction, Scorer, reward_function
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.rows import TrainingBatch
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")

Metrics = dict[str, float]
Reward = RewardComputer | Scorer | Callable[..., Any]


@dataclass(frozen=True)
class Collected:
    """Trajectories with their rewards, and what was found on the way."""

    trajectories: list[Trajectory]
    metrics: Metrics


class Algorithm(ABC):
    """A way to train a run on tasks.

    Args:
        service: what ``gradwire.connect`` gives; used for the tokenizer, so None will do where ``inference`` is given.
        run: a ``TrainingClient``.
        tasks: prompts, rows or tasks; or a :class:`~gradwire.rl.curricula.Curriculum`.
        reward: a reward function, any scorer, or a :class:`~gradwire.rl.rewards.RewardComputer`.
        config: settings; the defaults otherwise.
        environment: the world; by default one prompt and one response.
        inference: what samples; by default the run itself.
        eval_tasks: held out, for :meth:`evaluate`.
        loggers: beside the JSONL file.
        tokenizer: the user's own; by default the server's.
        recorder: which trajectories are kept; by default as ``config.record_every`` says.
    """

    needs_head: str | None = None
    replays: bool = False

    def __init__(
        self,
        service: Any,
        run: Any,
        tasks: Tasks | Curriculum,
        reward: Reward,
        config: AlgorithmConfig | None = None,
        *,
        environment: BaseEnvironment | None = None,
        inference: InferenceModule | None = None,
        eval_tasks: Tasks = (),
        loggers: Sequence[MetricLogger] = (),
        tokenizer: Any = None,
        recorder: TrajectoryRecorder | None = None,
        replay: ReplayBuffer | None = None,
    ) -> None:
        self.config = config or AlgorithmConfig()
        if self.config.replay_fraction and not self.replays:
            raise ValueError(f"{type(self).__name__} learns from its own samples only: replay_fraction must be 0")
        if service is None and inference is None:
            raise ValueError("give a service, or an inference module")
        self.run = run
        self.environment = environment or SimpleTextEnvironment()
        self.reward = as_computer(reward)
        self.eval_tasks = list(eval_tasks)
        self.history: list[Metrics] = []
        self.state = AlgorithmState()
        self.replay = replay or ReplayBuffer(max(1, 8 * self.config.batch_size * self.config.group_size))
        self.curriculum = as_curriculum(tasks, self.config.seed)
        self._service, self._tokenizer, self._inference = service, tokenizer, inference
        self._loggers = list(loggers)
        folder = self.config.folder
        if folder is not None:
            self._loggers.insert(0, JsonlLogger(folder / "metrics.jsonl"))
        self._recorder = recorder
        if recorder is None and folder is not None and self.config.record_every:
            self._recorder = TrajectoryRecorder(folder / "trajectories.jsonl", every=self.config.record_every)
        self._rollouts: RolloutManager | None = None
        self._warned: set[str] = set()

    # ---------------------------------------------------------------- what an algorithm says of itself

    @abstractmethod
    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """What to train on: all of these trajectories can be."""

    # ---------------------------------------------------------------- training

    async def train(self, num_iterations: int, progress_bar: bool = True) -> list[Metrics]:
        """Trains for so many iterations more, and returns their metrics.

        What fails in a rollout or in a reward costs its trajectory and is in the metrics and the log; an error of the
        service is raised, with the run and this object as they were before the iteration's update.
        """
        await self._ready()
        first, last = self.state.iteration, self.state.iteration + num_iterations
        collecting: dict[int, asyncio.Task[Collected]] = {}
        history = []
        try:
            with Progress(type(self).__name__.removesuffix("Algorithm"), num_iterations, show=progress_bar) as progress:
                for iteration in range(first, last):
                    ahead = min(iteration + self.config.max_staleness + 1, last)
                    for number in range(iteration, ahead):
                        if number not in collecting:
                            collecting[number] = asyncio.create_task(self._collect(number))
                    started = time.monotonic()
                    collected = await collecting.pop(iteration)
                    metrics = collected.metrics | {"time/waited_for_rollouts_s": time.monotonic() - started}
                    metrics |= await self._iteration(iteration, collected.trajectories)
                    metrics |= await self._after(iteration)
                    metrics["time/iteration_s"] = time.monotonic() - started
                    self._log(iteration, metrics)
                    history.append(metrics)
                    progress.update(iteration - first + 1, self._shown(metrics))
        finally:
            for task in collecting.values():
                task.cancel()
            await asyncio.gather(*collecting.values(), return_exceptions=True)
        return history

    async def _iteration(self, iteration: int, trajectories: list[Trajectory]) -> Metrics:
        """Trains on these."""
        usable = [each for each in trajectories if each.ok]
        replayed = self._replayed(iteration)
        self.curriculum.update(trajectories)
        if self.config.replay_fraction:
            self.replay.add(usable)
        metrics: Metrics = {"train/trajectories": float(len(usable)), "train/replayed": float(len(replayed))}
        if usable or replayed:
            batch = await self.training_batch([*usable, *replayed])
            metrics |= {f"train/{name}": value for name, value in batch.metrics.items()}
            version = getattr(self._inference, "version", 0)
            if usable:
                metrics["train/staleness"] = float(version - written_at(usable))
            if batch.num_rows:
                metrics |= await self._update(iteration, batch)
        else:
            logger.warning("iteration %d: no trajectory can be trained on; the policy stays as it is", iteration)
        if self.config.reference_ema is not None:
            await self.run.update_reference(ema=self.config.reference_ema)
        if self._recorder is not None:
            assert self._inference is not None
            await self._recorder.record(iteration, trajectories, self._inference.codec)
        self.state = replace(self.state, iteration=iteration + 1)
        return metrics

    async def _update(self, iteration: int, batch: TrainingBatch) -> Metrics:
        """All passes over a batch are submitted at once; their results are awaited behind them."""
        results, steps = [], []
        rate = self.config.rate(iteration)
        for epoch in range(self.config.ppo_epochs):
            rng = np.random.default_rng(derive_seed(self.config.seed, "minibatches", iteration, epoch))
            order = rng.permutation(batch.num_rows) if self.config.num_minibatches > 1 else np.arange(batch.num_rows)
            for part in np.array_split(order, min(self.config.num_minibatches, batch.num_rows)):
                results.append(self.run.forward_backward(batch.take(part), batch.loss_fn, batch.loss_kwargs))
                steps.append(
                    self.run.optim_step(
                        rate,
                        max_grad_norm=self.config.max_grad_norm,
                        weight_decay=self.config.weight_decay,
                        on_nonfinite="skip",
                    )
                )
                if isinstance(self._inference, RunInference):
                    self._inference.stepped()
        losses, taken, failure = [], [], None
        for result, step in zip(results, steps):
            try:
                losses.append(await result)
                taken.append(await step)
            except GradwireError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        names = sorted({name for loss in losses for name in loss.metrics} - set(batch.meaningless))
        metrics = {
            f"train/{name}": _mean([loss.metrics[name] for loss in losses if name in loss.metrics]) for name in names
        }
        metrics |= {
            "train/grad_norm": _mean([step.grad_norm for step in taken]),
            "train/learning_rate": rate,
            "train/skipped_steps": float(sum(step.skipped for step in taken)),
            "train/tokens": float(sum(loss.num_loss_tokens for loss in losses)),
        }
        self._warn(iteration, [warning for loss in losses for warning in loss.warnings], batch)
        return metrics

    def _warn(self, iteration: int, warnings: Sequence[str], batch: TrainingBatch) -> None:
        """Passes the service's warnings on, each kind once; not those that this batch's layout makes meaningless."""
        for warning in warnings:
            name = warning.split(" ", 1)[0]
            if name not in self._warned and name not in batch.meaningless:
                self._warned.add(name)
                logger.warning("iteration %d: %s", iteration, warning)

    async def _after(self, iteration: int) -> Metrics:
        """Evaluation and checkpoints, where they are due."""
        config, metrics = self.config, Metrics()
        if config.eval_every and self.eval_tasks and (iteration + 1) % config.eval_every == 0:
            metrics = await self.evaluate()
            if metrics["eval/success"] > self.state.best_success:
                self.state = replace(self.state, best_success=metrics["eval/success"])
                if config.folder is not None:
                    await self.save_checkpoint(best=True)
        if config.save_every and (iteration + 1) % config.save_every == 0:
            await self.save_checkpoint()
        return metrics

    # ---------------------------------------------------------------- evaluation

    async def evaluate(self, tasks: Tasks | None = None) -> Metrics:
        """Mean score, share of successes and length over held-out tasks, always with the same seeds."""
        manager = await self._ready()
        chosen = as_tasks(self.eval_tasks if tasks is None else tasks)
        params = replace(self.config.sampling, temperature=self.config.eval_temperature)
        rollouts = await manager.collect(
            chosen,
            group_size=self.config.eval_trajectories,
            params=params,
            seed=derive_seed(self.config.seed, "evaluation"),
        )
        await self.reward.compute(rollouts.trajectories)
        scores = [each.evaluation.score if each.ok and each.evaluation else 0.0 for each in rollouts.trajectories]
        return {
            "eval/score": _mean(scores),
            "eval/success": _mean([float(score >= self.config.success_threshold) for score in scores]),
            "eval/steps": rollouts.statistics.avg_trajectory_length,
            "eval/tokens": rollouts.statistics.avg_tokens,
            "eval/failed": float(sum(not each.ok for each in rollouts.trajectories)),
        }

    # ---------------------------------------------------------------- checkpoints

    async def save_checkpoint(self, name: str = "", best: bool = False) -> Any:
        """Saves the run on the server, and the algorithm's own state in ``checkpoint_dir``.

        Args:
            name: of the server's checkpoint; by default ``iteration-N``.
            best: keep it as the best so far, under the name ``best``.
        """
        name = name or ("best" if best else f"iteration-{self.state.iteration}")
        checkpoint = await self.run.save_checkpoint(name=name, note=type(self).__name__, overwrite=True)
        state = replace(self.state, checkpoint=checkpoint.path, curriculum=self.curriculum.state())
        state = replace(state, version=getattr(self._inference, "version", 0))
        if self.config.folder is not None:
            state.save(self.config.folder / ("best.json" if best else "state.json"))
        return checkpoint

    async def resume(self, best: bool = False) -> int:
        """Goes on from the last checkpoint (or the best); returns the iterations done. 0 when there is none yet.

        Tasks, seeds and sampling of an iteration depend on its number, so what follows equals what would have followed.
        """
        if self.config.folder is None:
            raise ValueError("to resume, the config needs the checkpoint_dir of the training")
        file = self.config.folder / ("best.json" if best else "state.json")
        if not file.exists():
            return 0
        await self._ready()
        state = AlgorithmState.read(file)
        await self.run.load_checkpoint(state.checkpoint)
        self.state = state
        self.curriculum.load(state.curriculum)
        if isinstance(self._inference, RunInference):
            self._inference.version = state.version
        return state.iteration

    def close(self) -> None:
        """Ends loggers and sandboxes."""
        self.reward.close()
        for each in self._loggers:
            each.close()
        if self._recorder is not None:
            self._recorder.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- parts

    async def _ready(self) -> RolloutManager:
        """The rollouts, made at the first need: that takes asking the server."""
        if self._rollouts is not None:
            return self._rollouts
        if self.needs_head is not None:
            head = (await self.run.info()).head
            if head != self.needs_head:
                raise ValueError(
                    f'{type(self).__name__} needs a run made with create_run(..., head="{self.needs_head}"); this one '
                    f"has {head or 'no head'}"
                )
        if self._inference is None:
            self._inference = await RunInference.of(self._service, self.run, self._tokenizer)
        config = self.config
        self._rollouts = RolloutManager(
            self._inference,
            self.environment,
            num_parallel=config.num_parallel,
            max_steps_per_rollout=config.max_steps_per_rollout,
            group_size=config.group_size,
            params=config.sampling,
            timeout_s=config.rollout_timeout_s,
            context_tokens=config.context_tokens,
            seed=config.seed,
        )
        return self._rollouts

    async def _collect(self, iteration: int) -> Collected:
        manager = await self._ready()
        tasks = self.curriculum.select(iteration, self.config.batch_size)
        rollouts = await manager.collect(
            tasks,
            seed=derive_seed(self.config.seed, "rollouts", iteration),
            first_group=iteration * self.config.batch_size,
        )
        report = await self.reward.compute(rollouts.trajectories)
        for error, count in {**rollouts.errors, **report.errors}.items():
            logger.warning("iteration %d: %d trajectories: %s", iteration, count, error)
        return Collected(rollouts.trajectories, {**rollouts.statistics.metrics(), **report.metrics})

    def _replayed(self, iteration: int) -> list[Trajectory]:
        groups = round(self.config.replay_fraction * self.config.batch_size)
        if not groups:
            return []
        rng = np.random.default_rng(derive_seed(self.config.seed, "replay", iteration))
        return self.replay.sample(groups, rng, version=getattr(self._inference, "version", 0))

    def _log(self, iteration: int, metrics: Metrics) -> None:
        self.history.append(metrics)
        for each in self._loggers:
            each.log(iteration, metrics)

    def _shown(self, metrics: Mapping[str, float]) -> Metrics:
        names = (
            "rewards/reward",
            "eval/success",
            "train/kl_divergence",
            "train/entropy",
            "rollouts/avg_trajectory_length",
        )
        return {name.split("/")[1]: metrics[name] for name in names if name in metrics}


def as_computer(reward: Reward) -> RewardComputer:
    """A reward computer from one, from a scorer, or from a plain function."""
    if isinstance(reward, RewardComputer):
        return reward
    if isinstance(reward, RewardFunction) or hasattr(reward, "evaluate"):
        return RewardComputer(reward)
    return RewardComputer(reward_function(reward))


def as_curriculum(tasks: Tasks | Curriculum, seed: int) -> Curriculum:
    """A curriculum from one, or from tasks in a new order each epoch."""
    return tasks if isinstance(tasks, Curriculum) else ShuffledCurriculum(as_tasks(tasks), seed=seed)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
