"""The base of the algorithms: rollouts, rewards, updates, evaluation and checkpoints, iteration by iteration."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

import numpy as np

from gradwire import sync
from gradwire.loop.loggers import JsonlLogger, MetricLogger
from gradwire.loop.training_loop import Plan, TrainingLoop
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.evaluation import evaluate
from gradwire.rl.algorithms.reporting import Reporter, check_failures, shown, warn_of_cut
from gradwire.rl.algorithms.sampler_correction import SamplerCorrection
from gradwire.rl.algorithms.scored_rollouts import Manager
from gradwire.rl.algorithms.sources import Source, Sources
from gradwire.rl.algorithms.update import update
from gradwire.rl.algorithms.weights import asleep, can_update, check_updatable, staleness
from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum, Tasks, as_curriculum, as_tasks
from gradwire.rl.environments import Environment, EpisodeEnvironment, SimpleTextEnvironment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.inference import InferenceModule, RunInference
from gradwire.rl.metrics import Mean, Metric, Metrics, Sum, merged, values_of
from gradwire.rl.recording import Recorder
from gradwire.rl.replay import ReplayBuffer
from gradwire.rl.rewards import Reward, as_computer
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.rows import TrainingBatch
from gradwire.rl.types import Trajectory
from gradwire.wire.options import check_options

logger = logging.getLogger("gradwire.rl")


class AlgorithmOptions(TypedDict, total=False):
    """The keyword arguments of every :class:`Algorithm`.

    Attributes:
        environment: The environment, or a :class:`~gradwire.rl.environments.GroupBuilder`; by default one prompt and
            one response.
        rollout_manager: Collects trajectories instead of a ``RolloutManager`` built from the config. It brings its own
            environment and sampler (``inference`` may name the object that receives the weights, if that is
            not ``rollout_manager.inference``). ``group_size`` and the sampling parameters still come from the config.
        inference: The sampler; by default the run itself. Any other sampler receives the run's weights after each
            iteration, through its ``update_weights``.
        allow_stale: Accept an ``inference`` that cannot receive weights: it keeps sampling from the first policy.
            False by default.
        eval_tasks: Held-out tasks for :meth:`Algorithm.evaluate`; none by default.
        loggers: Loggers in addition to the JSONL file.
        tokenizer: The user's own tokenizer; by default the server's.
        recorder: Recorder of trajectories; by default one that follows ``config.record_every``.
        replay: Buffer of trajectories for ``config.replay_fraction``; by default it holds eight iterations.
    """

    environment: Environment | GroupBuilder | None
    rollout_manager: Manager | None
    inference: InferenceModule | None
    allow_stale: bool
    eval_tasks: Tasks
    loggers: Sequence[MetricLogger]
    tokenizer: Any
    recorder: Recorder | None
    replay: ReplayBuffer | None


class Algorithm(ABC):
    """An algorithm that trains a run on tasks.

    Args:
        service: The service returned by ``gradwire.connect``; used for the tokenizer, so None is enough with
            ``inference``.
        run: A ``TrainingClient``.
        tasks: Prompts, rows or tasks; or a :class:`~gradwire.rl.curricula.Curriculum`.
        reward: A reward function, any scorer, or a :class:`~gradwire.rl.rewards.RewardComputer`.
        config: The settings; defaults if None.
        options: ``environment``, ``inference``, ``eval_tasks`` and others: see :class:`AlgorithmOptions`.

    Attributes:
        needs_head: The head that the run must have.
        replays: Whether the loss can learn from trajectories of earlier policies.
        corrects: Whether the loss can weight stale samples by truncated importance.
        straggler_s: Seconds that other episodes wait for the slowest environment step; None: until it ends.
        history: The metrics of each iteration of this object.
        loop: The loop around the iterations; ``loop.step`` is the number of finished ones.
        version: Number of optimizer steps of the run, including submitted ones.
    """

    needs_head: str | None = None
    replays: bool = False
    corrects: bool = False
    compares_groups: bool = False
    straggler_s: float | None = 5.0

    def __init__(
        self,
        service: Any,
        run: Any,
        tasks: Tasks | Curriculum,
        reward: Reward,
        config: AlgorithmConfig | None = None,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        check_options(AlgorithmOptions, options, type(self))
        environment, inference = options.get("environment"), options.get("inference")
        rollout_manager, eval_tasks = options.get("rollout_manager"), options.get("eval_tasks", ())
        self.config = config or AlgorithmConfig()
        if self.config.replay_fraction and not self.replays:
            raise ValueError(f"{type(self).__name__} learns from its own samples only: replay_fraction must be 0")
        if self.compares_groups and self.config.group_size == 1:
            raise ValueError(f"{type(self).__name__} compares within a group: set group_size to at least 2")
        if isinstance(run, sync.TrainingClient):
            raise TypeError(
                "the run comes from gradwire.sync, but algorithms need the asynchronous client: use "
                "`async with gradwire.connect(...)` and asyncio.run()"
            )
        if not hasattr(run, "forward_backward"):
            raise TypeError(
                f"run is {type(run).__name__}; it must be a TrainingClient, as returned by `await "
                "service.create_run(...)`"
            )
        if rollout_manager is not None:
            if environment is not None:
                raise ValueError("a rollout manager has its own environment: pass environment to it, not here")
            environment, inference = (
                getattr(rollout_manager, "environment", None),
                inference or getattr(rollout_manager, "inference", None),
            )
        if service is None and inference is None and rollout_manager is None:
            raise ValueError("pass a service or an inference module")
        if not options.get("allow_stale", False) and (inference is not None or rollout_manager is not None):
            check_updatable(inference or rollout_manager, run)
        self.run = run
        self.environment = environment or SimpleTextEnvironment()
        self.reward = as_computer(reward)
        self.eval_tasks = as_tasks(eval_tasks) if eval_tasks else []
        if self.config.eval_every and not self.eval_tasks:
            raise ValueError("eval_every needs held-out tasks: eval_tasks=[...]")
        self.replay = options.get("replay") or ReplayBuffer(max(1, 8 * self.config.batch_size * self.config.group_size))
        self.curriculum = as_curriculum(tasks, self.config.seed)
        self._service, self._tokenizer, self._inference = service, options.get("tokenizer"), inference
        self._reporter = Reporter(self.config, options.get("recorder"))
        log = JsonlLogger((self.config.folder or Path("runs") / run.run_id) / "metrics.jsonl")
        loggers = [log, *options.get("loggers", ()), self._reporter]
        self.loop = TrainingLoop(
            run, self._plan(), loggers, self._state_file(), own=self._state, shown=shown, save=self.save_checkpoint
        )
        self._rollout_manager = rollout_manager
        self._sources: Sources | None = None
        self._sampler_correction = SamplerCorrection(run, self.config.temperature, self._reporter)
        self.version = 0

    # ---------------------------------------------------------------- defined by each algorithm

    @abstractmethod
    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """Build the training batch from trajectories, all of which can be trained on."""

    # ---------------------------------------------------------------- training

    async def train(
        self,
        num_iterations: int,
        progress_bar: bool = True,
        *,
        mode: Literal["sync", "async"] = "sync",
        max_staleness: int | None = None,
    ) -> list[Metrics]:
        """Train for this many more iterations, and return their metrics.

        A failure of a rollout or a reward costs only its trajectory; it appears in the metrics and the log.

        Args:
            num_iterations: Number of iterations.
            progress_bar: Show a line with live numbers.
            mode: ``sync``: rollouts of whole iterations, up to ``config.max_staleness`` of them ahead. ``async``:
                generation continues while the policy trains, and each minibatch is trained on as soon as its groups are
                complete. Episodes in progress continue with the newer policy. Results depend on timing.
            max_staleness: For ``async``: maximum age of a group's oldest token in optimizer steps; older groups are
                dropped or corrected for, as ``config.on_stale`` says. By default 1, or ``config.max_staleness`` if
                that is larger.

        Raises:
            RolloutsFailedError: Every episode or every reward of an iteration failed, and
                ``config.on_failure`` is not ``"warn"``.
            GradwireError: An error of the service, raised once all operations of the iteration have ended. The
                iteration does not count; minibatches before the failed one have been trained on.
        """
        sources = await self._ready()
        first, before = self.loop.step, len(self.history)
        last = first + num_iterations
        async with self._source(sources, mode, max_staleness, range(first, last)) as source:

            async def step(iteration: int) -> Metrics:
                return await self._iteration(iteration, source)

            await self.loop.train(last, step, self.evaluate, show=progress_bar)
        return self.history[before:]

    def _source(self, sources: Sources, mode: str, max_staleness: int | None, iterations: range) -> Source:
        if mode == "sync":
            if max_staleness is not None:
                raise ValueError('max_staleness applies to mode="async"; for mode="sync" set it in the config')
            return sources.ahead(iterations)
        if mode != "async":
            raise ValueError(f'mode must be "sync" or "async", got {mode!r}')
        if self.config.on_stale == "correct" and not self.corrects:
            raise ValueError(
                f'the loss of {type(self).__name__} has no correction for stale samples: use on_stale="drop"'
            )
        stale = max(1, self.config.max_staleness) if max_staleness is None else max_staleness
        return sources.stream(iterations.start, stale, lambda: self.version)

    async def _iteration(self, iteration: int, source: Source) -> Metrics:
        """Collect and train, part by part."""
        trained: list[Trajectory] = []
        metrics: list[dict[str, Metric]] = []
        waited = time.monotonic()
        async for part in source.parts(iteration):
            measured = {"time/waited_for_rollouts_s": Sum(time.monotonic() - waited), **part.metrics}
            self.curriculum.update([*part.trajectories, *part.set_aside])
            if self.config.on_failure == "stop":
                check_failures(iteration, [*part.trajectories, *part.set_aside])
            await warn_of_cut(
                self._reporter, [*part.trajectories, *part.set_aside], self.config.max_tokens, self._codec
            )
            minibatches = 1 if source.streaming else self.config.num_minibatches
            metrics.append(measured | await self._learn(iteration, part.trajectories, minibatches))
            trained += part.trajectories
            waited = time.monotonic()
        if self.config.reference_ema is not None:
            await self.run.update_reference(ema=self.config.reference_ema)
        await self._reporter.record(iteration, trained, self._codec)
        return values_of(merged(metrics))

    async def _learn(self, iteration: int, trajectories: list[Trajectory], minibatches: int) -> dict[str, Metric]:
        """Train on these trajectories."""
        usable = [each for each in trajectories if each.ok]
        replayed = self._replayed(iteration)
        if self.config.replay_fraction:
            self.replay.add(usable)
        metrics: dict[str, Metric] = {"train/trajectories": Sum(len(usable)), "train/replayed": Sum(len(replayed))}
        if not usable and not replayed:
            logger.warning("iteration %d: no trajectory can be trained on; the policy is unchanged", iteration)
            return metrics
        async with asleep(self._inference):
            batch = await self.training_batch([*usable, *replayed])
            for name, value in batch.metrics.items():
                size = len(usable) + len(replayed)
                metrics[f"train/{name}"] = (
                    Mean(value * size, size) if isinstance(value, float | int | np.number) else value
                )
            metrics |= staleness(usable, self.version)
            if batch.num_rows:
                found, warnings = await update(self.run, batch, self.config, iteration, self._stepped, minibatches)
                self._reporter.pass_on(iteration, warnings, batch.meaningless)
                metrics |= {f"train/{name}": value for name, value in found.items()}
                await self._update_weights()
        return metrics

    def _stepped(self) -> None:
        self.version += 1
        if isinstance(self._inference, RunInference):  # samples requested from now on come after this step
            self._inference.version = self.version

    async def _update_weights(self) -> None:
        """Send the run's weights to the sampler, if it can receive them."""
        if self._inference is not None and can_update(self._inference, self.run):
            await self._inference.update_weights(self.run, self.version)

    @property
    def _codec(self) -> Any:
        return self._inference.codec if self._inference is not None else None

    @property
    def history(self) -> list[Metrics]:
        return self._reporter.history

    # ---------------------------------------------------------------- evaluation

    async def evaluate(self, tasks: Tasks | None = None) -> Metrics:
        """Compute mean score, success rate and length over held-out tasks, always with the same seeds."""
        manager = (await self._ready()).manager
        return await evaluate(manager, self.reward, as_tasks(self.eval_tasks if tasks is None else tasks), self.config)

    # ---------------------------------------------------------------- checkpoints

    async def save_checkpoint(self, name: str = "", best: bool = False) -> Any:
        """Save the run on the server, and the algorithm's own state in ``checkpoint_dir``.

        Args:
            name: Name of the server's checkpoint; by default ``iteration-N``.
            best: Keep it as the best so far, under the name ``best``.
        """
        return await self.loop.save(name, best)

    async def resume(self, best: bool = False) -> int:
        """Continue from the last checkpoint (or the best); return the number of finished iterations, 0 if none.

        Tasks, seeds and sampling of an iteration depend on its number, so the resumed training equals an uninterrupted
        one. What ``metrics.jsonl`` and ``trajectories.jsonl`` have of later iterations is removed: it is written again.
        """
        if self.config.folder is None:
            raise ValueError("resume() needs the checkpoint_dir of the training in the config")
        state = await self.loop.resume(best)
        if state:
            await self._ready()
            self._restore(state)
            await self._update_weights()
        return self.loop.step

    def _plan(self) -> Plan:
        """When to evaluate and to save."""
        config, label = self.config, type(self).__name__.removesuffix("Algorithm")
        return Plan(
            label, "iteration", first=0, eval_every=config.eval_every, save_every=config.save_every, at_end=False,
            best_by="success" if config.folder is not None else "",
        )  # fmt: skip

    def _state_file(self) -> Path | None:
        return None if self.config.folder is None else self.config.folder / "state.json"

    def _state(self) -> Mapping[str, Any]:
        """What a resumed training needs besides the checkpoint."""
        return {"version": self.version, "curriculum": self.curriculum.state()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`_state` returned."""
        self.version = state["version"]
        self.curriculum.load(state["curriculum"])

    def close(self) -> None:
        """Close loggers and sandboxes."""
        self.reward.close()
        if isinstance(self.environment, EpisodeEnvironment):
            self.environment.close()
        self.loop.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.to_thread(self.reward.close)  # sandboxes take a moment to end
        finally:
            self.close()

    # ---------------------------------------------------------------- components

    async def _ready(self) -> Sources:
        """Create the components at first use, because that needs requests to the server."""
        if self._sources is not None:
            return self._sources
        info = await self.run.info()
        if self.needs_head is not None and info.head != self.needs_head:
            raise ValueError(
                f'{type(self).__name__} needs a run made with create_run(..., head="{self.needs_head}"); this run has '
                f"{info.head or 'no head'}"
            )
        if self._inference is None and self._rollout_manager is None:
            self._inference = await RunInference.of(self._service, self.run, self._tokenizer)
        manager = self._rollout_manager or self._manager()
        self.version = info.step
        await self._update_weights()
        self._sources = Sources(manager, self.reward, self.curriculum, self.config)
        return self._sources

    def _manager(self) -> RolloutManager:
        assert self._inference is not None and self.environment is not None
        config = self.config
        return RolloutManager(
            self._inference,
            self.environment,
            num_parallel=config.num_parallel,
            max_steps_per_rollout=config.max_steps_per_rollout,
            group_size=config.group_size,
            timeout_s=config.rollout_timeout_s,
            context_tokens=config.context_tokens,
            seed=config.seed,
            straggler_s=self.straggler_s,
        )

    def _loss_kwargs(self) -> dict[str, Any]:
        """Arguments of every group loss: KL, the correction for stale samples, and the user's own."""
        correction = {"sampler_correction": "token_truncate"} if self.config.on_stale == "correct" else {}
        return {**self.config.kl_kwargs(), **correction, **self.config.loss_kwargs}

    def _replayed(self, iteration: int) -> list[Trajectory]:
        groups = round(self.config.replay_fraction * self.config.batch_size)
        if not groups:
            return []
        rng = np.random.default_rng(derive_seed(self.config.seed, "replay", iteration))
        return self.replay.sample(groups, rng, version=self.version)
