"""What the algorithms share: rollouts, rewards, updates, evaluation, checkpoints, one iteration after the other."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from gradwire.rl.algorithms.collecting import Ahead, Collected, Metrics, collect_scored
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.evaluation import evaluate
from gradwire.rl.algorithms.state import AlgorithmState
from gradwire.rl.algorithms.update import update
from gradwire.rl.algorithms.weights import can_update, check_updatable, staleness
from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum, Tasks, as_curriculum, as_tasks
from gradwire.rl.environments import BaseEnvironment, SimpleTextEnvironment
from gradwire.rl.inference import InferenceModule, RunInference
from gradwire.rl.loggers import JsonlLogger, MetricLogger
from gradwire.rl.progress import Progress
from gradwire.rl.recording import TrajectoryRecorder
from gradwire.rl.replay import ReplayBuffer
from gradwire.rl.rewards import Reward, as_computer
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.rows import TrainingBatch
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")


class Algorithm(ABC):
    """A way to train a run on tasks.

    Args:
        service: what ``gradwire.connect`` gives; used for the tokenizer, so None will do where ``inference`` is given.
        run: a ``TrainingClient``.
        tasks: prompts, rows or tasks; or a :class:`~gradwire.rl.curricula.Curriculum`.
        reward: a reward function, any scorer, or a :class:`~gradwire.rl.rewards.RewardComputer`.
        config: settings; the defaults otherwise.
        environment: the world; by default one prompt and one response.
        inference: what samples; by default the run itself. Anything else is given the run's weights after each
            iteration, by its ``update_weights``.
        allow_stale: take an ``inference`` that cannot be given them: its samples stay the first policy's.
        eval_tasks: held out, for :meth:`evaluate`.
        loggers: beside the JSONL file.
        tokenizer: the user's own; by default the server's.
        recorder: which trajectories are kept; by default as ``config.record_every`` says.
        replay: where trajectories are kept for ``config.replay_fraction``; by default eight iterations' worth.

    Attributes:
        needs_head: the head that the run has to have.
        replays: whether the loss can learn from trajectories of earlier policies.
        history: the metrics of each iteration of this object.
        version: optimizer steps that the run has taken, those that are only submitted included.
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
        allow_stale: bool = False,
        eval_tasks: Tasks = (),
        loggers: Sequence[MetricLogger] = (),
        tokenizer: Any = None,
        recorder: TrajectoryRecorder | None = None,
        replay: ReplayBuffer | None = None,
    ) -> None:
        self.config = config or AlgorithmConfig()
        if self.config.replay_fraction and not self.replays:
            raise ValueError(f"{type(self).__name__} learns from its own samples only: replay_fraction must be 0")
        if not hasattr(run, "forward_backward"):
            raise TypeError(
                f"run is {type(run).__name__}; it must be a TrainingClient, as `await service.create_run(...)` gives"
            )
        if service is None and inference is None:
            raise ValueError("give a service, or an inference module")
        if inference is not None and not allow_stale:
            check_updatable(inference, run)
        self.run = run
        self.environment = environment or SimpleTextEnvironment()
        self.reward = as_computer(reward)
        self.eval_tasks = as_tasks(eval_tasks) if eval_tasks else []
        if self.config.eval_every and not self.eval_tasks:
            raise ValueError("eval_every needs eval_tasks=[...], which are held out")
        self.history: list[Metrics] = []
        self.state = AlgorithmState()
        self.replay = replay or ReplayBuffer(max(1, 8 * self.config.batch_size * self.config.group_size))
        self.curriculum = as_curriculum(tasks, self.config.seed)
        self._service, self._tokenizer, self._inference = service, tokenizer, inference
        self._loggers = list(loggers)
        folder = self.config.folder
        self._loggers.insert(0, JsonlLogger((folder or Path("runs") / run.run_id) / "metrics.jsonl"))
        self._recorder = recorder
        if recorder is None and folder is not None and self.config.record_every:
            self._recorder = TrajectoryRecorder(folder / "trajectories.jsonl", every=self.config.record_every)
        self._rollouts: RolloutManager | None = None
        self.version = 0
        self._warned: set[str] = set()

    # ---------------------------------------------------------------- what an algorithm says of itself

    @abstractmethod
    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """What to train on: all of these trajectories can be."""

    # ---------------------------------------------------------------- training

    async def train(self, num_iterations: int, progress_bar: bool = True) -> list[Metrics]:
        """Trains for so many iterations more, and returns their metrics.

        What fails in a rollout or in a reward costs its trajectory and is in the metrics and the log.

        Raises:
            GradwireError: the service's, once all operations of the iteration have ended. The iteration does not count;
                minibatches before the one that failed have been trained on.
        """
        await self._ready()
        first, last = self.state.iteration, self.state.iteration + num_iterations
        history = []
        with Progress(type(self).__name__.removesuffix("Algorithm"), num_iterations, show=progress_bar) as progress:
            async with Ahead(self._collect, range(first, last), self.config.max_staleness) as rollouts:
                for iteration in range(first, last):
                    started = time.monotonic()
                    collected = await rollouts.take(iteration)
                    metrics = collected.metrics | {"time/waited_for_rollouts_s": time.monotonic() - started}
                    metrics |= await self._iteration(iteration, collected.trajectories)
                    metrics |= await self._after(iteration)
                    metrics["time/iteration_s"] = time.monotonic() - started
                    self._log(iteration, metrics)
                    history.append(metrics)
                    progress.update(iteration - first + 1, _shown(metrics))
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
            metrics |= staleness(usable, self.version)
            if batch.num_rows:
                metrics |= await self._update(iteration, batch)
                await self._update_weights()
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
        metrics, warnings = await update(self.run, batch, self.config, iteration, self._stepped)
        self._warn(iteration, warnings, batch)
        return {f"train/{name}": value for name, value in metrics.items()}

    def _stepped(self) -> None:
        self.version += 1
        if isinstance(self._inference, RunInference):  # what it is asked for from now on comes after this step
            self._inference.version = self.version

    async def _update_weights(self) -> None:
        """Brings the run's weights to what samples, where that can be."""
        assert self._inference is not None
        if can_update(self._inference, self.run):
            await self._inference.update_weights(self.run, self.version)

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
        if config.eval_every and (iteration + 1) % config.eval_every == 0:
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
        return await evaluate(manager, self.reward, as_tasks(self.eval_tasks if tasks is None else tasks), self.config)

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
        state = replace(state, version=self.version)
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
        self.version = state.version
        await self._update_weights()
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
        self.version = (await self.run.info()).step
        await self._update_weights()
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
        return await collect_scored(
            await self._ready(),
            self.reward,
            self.curriculum.select(iteration, self.config.batch_size),
            f"iteration {iteration}",
            seed=derive_seed(self.config.seed, "rollouts", iteration),
            first_group=iteration * self.config.batch_size,
        )

    def _replayed(self, iteration: int) -> list[Trajectory]:
        groups = round(self.config.replay_fraction * self.config.batch_size)
        if not groups:
            return []
        rng = np.random.default_rng(derive_seed(self.config.seed, "replay", iteration))
        return self.replay.sample(groups, rng, version=self.version)

    def _log(self, iteration: int, metrics: Metrics) -> None:
        self.history.append(metrics)
        for each in self._loggers:
            each.log(iteration, metrics)


SHOWN = (
    "rewards/reward",
    "eval/success",
    "train/kl_divergence",
    "train/entropy",
    "rollouts/avg_trajectory_length",
    "rewards/not_scored",
)


def _shown(metrics: Mapping[str, float]) -> Metrics:
    """What the progress bar has room for: what is known, and what went wrong if anything did."""
    known = {name: metrics[name] for name in SHOWN if math.isfinite(metrics.get(name, math.nan))}
    return {name.split("/")[1]: value for name, value in known.items() if value or name != "rewards/not_scored"}
