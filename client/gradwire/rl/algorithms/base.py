"""The base of the algorithms: rollouts, rewards, updates, evaluation and checkpoints, iteration by iteration."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

import numpy as np
from gradwire_proto import rates

from gradwire import sync
from gradwire.errors import GradwireError
from gradwire.loop.loggers import JsonlLogger, MetricLogger
from gradwire.loop.training_loop import Plan, TrainingLoop
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.evaluation import evaluate
from gradwire.rl.algorithms.ledger import TRAINED, Ledger
from gradwire.rl.algorithms.reporting import Reporter, RolloutsFailedError, check_failures, shown, warn_of_cut
from gradwire.rl.algorithms.sampler_correction import SamplerCorrection
from gradwire.rl.algorithms.scored_rollouts import Manager
from gradwire.rl.algorithms.sources import Pace, Part, Source
from gradwire.rl.algorithms.update import Update
from gradwire.rl.algorithms.weights import asleep, can_update, check_updatable, staleness
from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum, Tasks, as_curriculum, as_tasks
from gradwire.rl.environments import Environment, EpisodeEnvironment, SimpleTextEnvironment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.group_log import GroupLog
from gradwire.rl.inference import InferenceModule, RunInference
from gradwire.rl.metrics import Mean, Metric, Metrics, Sum, merged, values_of
from gradwire.rl.recording import Recorder
from gradwire.rl.replay import ReplayBuffer
from gradwire.rl.rewards import Reward, as_computer
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.rows import Row, TrainingBatch
from gradwire.rl.types import FloatArray, Trajectory
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
        takes_own_logprobs: Whether the loss takes the log-probabilities of its own forward where ``old_log_probs`` are
            not given.
        replays: Whether the loss can learn from trajectories of earlier policies.
        straggler_s: Seconds that other episodes wait for the slowest environment step; None: until it ends.
        history: The metrics of each iteration of this object.
        loop: The loop around the iterations; ``loop.step`` is the number of finished ones.
        version: Number of optimizer steps that the run has taken, as the server counts them.
    """

    needs_head: str | None = None
    takes_own_logprobs: bool = False
    replays: bool = False
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
        folder = self.config.folder if self.config.save_every or self.config.replay_fraction else None
        self._group_log = GroupLog(folder and folder / "groups.jsonl")
        curriculum = as_curriculum(tasks, self.config.seed)
        self.ledger = Ledger(
            curriculum, self.config.batch_size, self.config.group_size, self._group_log, lambda: self.replay.numbers
        )
        self._service, self._tokenizer, self._inference = service, options.get("tokenizer"), inference
        self._reporter = Reporter(self.config, options.get("recorder"))
        log = JsonlLogger((self.config.folder or Path("runs") / run.run_id) / "metrics.jsonl")
        loggers = [log, *options.get("loggers", ()), self._reporter]
        self.loop = TrainingLoop(
            run, self._plan(), loggers, self._state_file(), own=self._state, shown=shown, save=self.save_checkpoint
        )
        self._rollout_manager = rollout_manager
        self._source: Source | None = None
        self._sampler_correction = SamplerCorrection(run, self.config, self._reporter)
        self._several_steps = True
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
                complete. Episodes in progress continue with the newer policy. Results depend on timing. In both, a
                call trains on each task that it takes, once; what an error left is the first of the next call.
            max_staleness: For ``async``: maximum age of a group's oldest token in optimizer steps. Generation, and
                at last training, waits so that no group becomes older. By default 1, or ``config.max_staleness`` if
                that is larger.

        Raises:
            RolloutsFailedError: Every episode or every reward of an iteration failed, and
                ``config.on_failure`` is not ``"warn"``.
            GradwireError: An error of the service, raised once all operations of the iteration have ended. The
                iteration does not count; minibatches before the failed one have been trained on.
        """
        source = await self._ready()
        pace, before = self._checked(self._pace(mode, max_staleness)), len(self.history)
        if not self.history:  # what another training left there is of no use to one that begins anew
            await self.ledger.prune_log(self.replay.numbers)
        async with source.working(pace, num_iterations):

            async def step(iteration: int) -> Metrics:
                return await self._iteration(iteration, source, 1 if mode == "async" else self.config.num_minibatches)

            await self.loop.train(self.loop.step + num_iterations, step, self.evaluate, show=progress_bar)
        return self.history[before:]

    def _pace(self, mode: str, max_staleness: int | None) -> Pace:
        if mode == "sync":
            if max_staleness is not None:
                raise ValueError('max_staleness applies to mode="async"; for mode="sync" set it in the config')
            return Pace.sync(self.config)
        if mode != "async":
            raise ValueError(f'mode must be "sync" or "async", got {mode!r}')
        stale = max(1, self.config.max_staleness) if max_staleness is None else max_staleness
        if stale < 0:
            raise ValueError(f"max_staleness must not be negative, got {stale}")
        return Pace.stream(self.config, stale)

    def _checked(self, pace: Pace) -> Pace:
        """Refuse samples whose staleness could not be corrected for."""
        if self._only_kept and pace.lag:
            raise ValueError(
                "with top_p < 1 or top_k > 0 the sampler's log-probabilities are of the kept tokens only, so that "
                "stale samples could not be corrected for: set top_p=1 and top_k=0, train with max_staleness=0, or use "
                "a sampler that returns those of the whole distribution (OpenAIInference(..., whole_logprobs=True))"
            )
        return pace

    async def _iteration(self, iteration: int, source: Source, minibatches: int) -> Metrics:
        """Collect and train, part by part."""
        update = Update(self.run, self.config, iteration, self.version)
        metrics: list[Mapping[str, Metric]] = []
        parts = update.parts
        waited = time.monotonic()
        try:
            async with aclosing(source.parts()) as arriving:
                async for part in arriving:
                    metrics.append({"time/waited_for_rollouts_s": Sum(time.monotonic() - waited), **part.metrics})
                    for group, reason in part.aside:
                        self.ledger.settle([group], reason)
                    metrics.append(await self._learn(update, part, minibatches))
                    if not update.accumulated:
                        self._settle_trained(parts)
                    waited = time.monotonic()
            metrics.append(await self._finish(update))
        except BaseException:
            with suppress(GradwireError):
                await self._finish(update)
                self._settle_trained(parts)
            raise
        self._settle_trained(parts)
        self._settle_failed(iteration, parts)
        everything = [each for part in parts for each in part.everything]
        await warn_of_cut(self._reporter, everything, self.config.max_tokens, self._codec)
        if self.config.reference_ema is not None:
            await self.run.update_reference(ema=self.config.reference_ema)
        await self._reporter.record(iteration, [each for part in parts for each in part.trajectories], self._codec)
        return values_of(merged(metrics)) | self.ledger.counts()

    def _settle_trained(self, parts: Sequence[Part]) -> None:
        groups = [group for part in parts for group in part.groups if group.number in self.ledger.open]
        self.ledger.settle([each for each in groups if each.usable], TRAINED)

    def _settle_failed(self, iteration: int, parts: Sequence[Part]) -> None:
        """Drop the groups of an iteration that cannot be trained on.

        Raises:
            RolloutsFailedError: None can, and that ends the training; they are collected again if it goes on.
        """
        failed = [group for part in parts for group in part.groups if not group.usable]
        try:
            if self.config.on_failure == "stop":
                check_failures(iteration, [each for part in parts for each in part.everything])
        except RolloutsFailedError:
            self.ledger.forget(failed)
            raise
        for group in failed:
            self.ledger.settle([group], "failed" if group.trajectories else "given_up")

    async def _learn(self, update: Update, part: Part, minibatches: int) -> dict[str, Metric]:
        """Train on a part; it is one of the update's parts as soon as it is, whatever fails or is cancelled then."""
        usable = [each for each in part.trajectories if each.ok and not each.by_other]
        replayed = self._replayed(update.iteration, part)
        if self.config.replay_fraction:
            self.replay.add(usable)
        metrics: dict[str, Metric] = {"train/trajectories": Sum(len(usable)), "train/replayed": Sum(len(replayed))}
        if not usable and not replayed:
            logger.warning("iteration %d: no trajectory can be trained on; the policy is unchanged", update.iteration)
            update.parts.append(part)
            return metrics
        self._several_steps = self.config.ppo_epochs * minibatches > 1
        async with asleep(self._inference):
            if self._only_kept:
                await self._sampler_correction.score(usable, self.version)
            batch = await self.training_batch([*usable, *replayed])
            for name, value in batch.metrics.items():
                size = len(usable) + len(replayed)
                metrics[f"train/{name}"] = (
                    Mean(value * size, size) if isinstance(value, float | int | np.number) else value
                )
            metrics |= staleness(usable, self.version)
            try:
                found, warnings = await update.train(batch, minibatches) if batch.num_rows else ({}, [])
            except asyncio.CancelledError:
                update.parts.append(part)
                raise
            update.parts.append(part)
            self._reporter.pass_on(update.iteration, warnings, batch.meaningless)
            metrics |= {f"train/{name}": value for name, value in found.items()}
            await self._follow(update.version)
        return metrics

    async def _finish(self, update: Update) -> dict[str, Metric]:
        """Take the optimizer step of an iteration's last minibatches, if one is due."""
        if not update.accumulated:
            return {}
        async with asleep(self._inference):
            found = await update.finish()
            await self._follow(update.version)
        return {f"train/{name}": value for name, value in found.items()}

    async def _follow(self, version: int, *, loaded: bool = False) -> None:
        """Send the run's weights to the sampler, if it can receive them and they changed.

        Args:
            version: Number of optimizer steps that the run has taken.
            loaded: Whether the weights may have changed without a step.
        """
        if version == self.version and not loaded:
            return
        if self._inference is not None and can_update(self._inference, self.run):
            await self._inference.update_weights(self.run, version)
        self.version = version

    @property
    def _only_kept(self) -> bool:
        """Whether the sampler's log-probabilities are those of the tokens that ``top_p`` or ``top_k`` kept."""
        cut = self.config.top_p < 1 or self.config.top_k > 0
        return cut and not getattr(self._inference, "whole_logprobs", False)

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
        checkpoint = await self.loop.save(name, best)
        if not best:
            await self.ledger.prune_log(self.replay.numbers)
        return checkpoint

    async def resume(self, best: bool = False) -> int:
        """Continue from the last checkpoint (or the best); return the number of finished iterations, 0 if none.

        The ledger of tasks is part of the checkpoint: none is lost, none trained on twice. Groups that were collected
        since then are taken from ``groups.jsonl`` (with ``save_every``; not for the best). The others are collected
        anew, with the same seeds. So a resumed synchronous training equals an uninterrupted one. What
        ``metrics.jsonl`` and ``trajectories.jsonl`` have of later iterations is removed: it is written again.
        """
        if self.config.folder is None:
            raise ValueError("resume() needs the checkpoint_dir of the training in the config")
        state = await self.loop.resume(best)
        if state:
            await self._ready(loaded=True)
            self._restore(state, logged=not best)
        else:
            self.ledger.read_log()
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
        """The state that a resumed training needs besides the checkpoint."""
        return {"ledger": self.ledger.state(), "replay": self.replay.numbers}

    def _restore(self, state: Mapping[str, Any], *, logged: bool) -> None:
        """Take over what :meth:`_state` returned."""
        if "replay" not in state:
            raise ValueError(f"{self._state_file()} is of an older version of gradwire, and cannot be resumed")
        tasks = self.ledger.load(state["ledger"], logged=logged)
        self.replay.clear()
        for group in self._group_log.groups({number: tasks[number] for number in state["replay"] if number in tasks}):
            self.replay.add([each for each in group if not each.by_other])

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

    async def _ready(self, *, loaded: bool = False) -> Source:
        """Create the components at first use, because that needs requests to the server; follow the steps that the run
        took meanwhile.

        Args:
            loaded: The run's weights were loaded from a checkpoint.
        """
        info = await self.run.info()
        if self._source is not None:
            await self._follow(info.step, loaded=loaded)
            return self._source
        if self.needs_head is not None and info.head != self.needs_head:
            raise ValueError(
                f'{type(self).__name__} needs a run made with create_run(..., head="{self.needs_head}"); this run has '
                f"{info.head or 'no head'}"
            )
        if self.config.learning_rate is None:
            model = await self.run.model_info()
            rate = rates.learning_rate("policy", model.hidden_size, adapter=info.lora is not None)
            self.config = replace(self.config, learning_rate=rate)
        if self._inference is None and self._rollout_manager is None:
            self._inference = await RunInference.of(self._service, self.run, self._tokenizer)
        manager = self._rollout_manager or self._manager()
        await self._follow(info.step, loaded=True)
        self._source = Source(manager, self.reward, self.ledger, self.config, lambda: self.version)
        return self._source

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
            partial_tokens=config.partial_tokens,
            seed=config.seed,
            straggler_s=self.straggler_s,
        )

    async def _corrected(
        self, rows: Sequence[Row], trajectories: Sequence[Trajectory], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[FloatArray] | None]:
        """Arguments of a loss with KL, the user's own, and the correction where another policy wrote the rows: see
        :class:`SamplerCorrection`."""
        stale = any(step.policy_version != self.version for each in trajectories for step in each.steps)
        scored = self._several_steps or not self.takes_own_logprobs
        return await self._sampler_correction.apply(rows, kwargs, stale=stale, scored=scored)

    def _loss_kwargs(self) -> dict[str, Any]:
        """Arguments of every group loss: KL, and the user's own."""
        return {**self.config.kl_kwargs(), **self.config.loss_kwargs}

    def _replayed(self, iteration: int, part: Part) -> list[Trajectory]:
        groups = round(self.config.replay_fraction * len(part.groups))
        if not groups:
            return []
        rng = np.random.default_rng(derive_seed(self.config.seed, "replay", iteration, part.groups[0].number))
        return self.replay.sample(groups, rng, version=self.version)
