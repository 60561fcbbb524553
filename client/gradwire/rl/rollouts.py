"""Collect many episodes of different lengths at once over one sampler."""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from gradwire.loop.progress import Progress
from gradwire.rl.batching import GenerationBatcher, SamplerStatistics, derive_seed
from gradwire.rl.environments.base import Environment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.generation import InferenceModule, SamplingParams
from gradwire.rl.prompts import ChatTemplate, TokenHistory
from gradwire.rl.rollout_statistics import Rollouts, summarised
from gradwire.rl.threads import called, is_cancelled
from gradwire.rl.types import AnyTask, Task, Trajectory
from gradwire.rl.worker import RLRolloutWorker
from gradwire.wire.options import check_options


@dataclass(frozen=True)
class Planned:
    """A planned episode; ``seed`` is the seed of its environment."""

    task: Task
    group: int
    member: int
    seed: int


@dataclass(frozen=True)
class Pace:
    """How many episodes run at once, and how many are enough.

    Attributes:
        num_parallel: Episodes in progress at once.
        wave: The next wave of this many episodes starts when all of the last have ended.
        enough: Number of trajectories, in whole groups, that end the collection; None: all.
    """

    num_parallel: int
    wave: int
    enough: int | None


class EpisodeRuns:
    """One call of :meth:`RolloutManager.collect`.

    Args:
        plan: All episodes, group by group.
        group_size: Episodes per group.
        environment: The environment of all episodes, or a builder that makes the environments of a group.
        worker: Makes the worker that runs the episodes of an environment; of another policy's members with its sampler.
        batcher: Batcher of the manager's sampler.
        others: Makes a batcher of another policy's sampler.
        shared: Whether the batcher also serves other collections.
        pace: How many episodes run at once, and how many are enough.
        show: Show a progress bar.
    """

    def __init__(
        self,
        plan: list[Planned],
        group_size: int,
        environment: Environment | GroupBuilder,
        worker: Callable[[Environment, InferenceModule | None], RLRolloutWorker],
        batcher: GenerationBatcher,
        others: Callable[[InferenceModule], GenerationBatcher],
        *,
        shared: bool,
        pace: Pace,
        show: bool,
    ) -> None:
        self._plan, self._size, self._worker, self._batcher = plan, group_size, worker, batcher
        self._environment, self._shared = environment, shared
        self._inferences = environment.inferences if isinstance(environment, GroupBuilder) else {}
        samplers = {id(each): each for each in self._inferences.values()}
        self._others = {name: others(sampler) for name, sampler in samplers.items()}
        self._built: dict[int, asyncio.Task[Sequence[Environment]]] = {}
        self._pace = pace
        self._done: dict[int, Trajectory] = {}
        self._members: dict[int, int] = {}
        self._complete = self._steps = self._failed = 0
        self._progress = Progress("rollouts", len(plan), show=show)
        self._started = time.monotonic()

    async def run(self) -> Rollouts:
        try:
            with self._progress:
                for start in range(0, len(self._plan), max(self._pace.wave, 1)):
                    stop = min(start + self._pace.wave, len(self._plan))
                    if not await self._wave(iter(range(start, stop)), min(self._pace.num_parallel, stop - start)):
                        break
        finally:
            for batcher in self._others.values():
                await batcher.close()
            if not self._shared:
                await self._batcher.close()
        return self._result()

    async def _wave(self, indices: Iterator[int], places: int) -> bool:
        """Run these episodes; return False if enough trajectories arrived before all had ended."""
        enough = asyncio.Event()
        # All episodes register before any runs; otherwise the first would not wait for the others.
        first = [next(indices) for _ in range(places)]
        for index in first:
            self._batcher_of(index).enter(self._place_of(index))
        tasks = [asyncio.create_task(self._place(index, indices, enough)) for index in first]
        stop = asyncio.create_task(enough.wait())
        try:
            pending: set[asyncio.Task[Any]] = set(tasks)
            while pending and not enough.is_set():
                done, _ = await asyncio.wait({*pending, stop}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    task.result()
                pending -= done
        finally:
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.gather(*tasks, stop, return_exceptions=True)
        return not enough.is_set()

    async def _place(self, index: int | None, indices: Iterator[int], enough: asyncio.Event) -> None:
        while index is not None:
            await self._episode(index)
            if self._pace.enough is not None and self._complete >= self._pace.enough:
                enough.set()
            # The next episode enters before the last one leaves: the slot is never empty in between.
            following = next(indices, None)
            if following is not None:
                self._batcher_of(following).enter(self._place_of(following))
            self._batcher_of(index).leave(self._place_of(index))
            index = following

    async def _episode(self, index: int) -> None:
        planned = self._plan[index]
        group = planned.group
        place, batcher = self._place_of(index), self._batcher_of(index)
        other = self._inferences.get(planned.member)
        try:
            environment = await self._environment_of(planned)
        except (Exception, asyncio.CancelledError) as error:  # the user's builder may raise anything; this group fails
            if is_cancelled():
                raise
            trajectory = Trajectory(planned.task, group, planned.member, planned.seed, status="failed")
            trajectory.error, trajectory.traceback = f"{type(error).__name__}: {error}", traceback.format_exc()
        else:
            trajectory = await self._worker(environment, other).run(
                planned.task,
                lambda prompt, params: batcher.generate(place, prompt, params),
                group=group,
                member=planned.member,
                seed=planned.seed,
            )
        trajectory.by_other = other is not None
        self._done[index] = trajectory
        self._steps += len(trajectory.steps)
        self._failed += trajectory.status in ("failed", "timeout")
        self._members[group] = self._members.get(group, 0) + 1
        if self._members[group] == self._size:
            self._complete += self._size
        self._progress.update(len(self._done), self._live())

    def _place_of(self, index: int) -> int:
        """Return a batcher number that no other collection uses."""
        return self._plan[index].group * self._size + self._plan[index].member

    def _batcher_of(self, index: int) -> GenerationBatcher:
        other = self._inferences.get(self._plan[index].member)
        return self._batcher if other is None else self._others[id(other)]

    async def _environment_of(self, planned: Planned) -> Environment:
        if not isinstance(self._environment, GroupBuilder):
            return self._environment
        if planned.group not in self._built:
            self._built[planned.group] = asyncio.create_task(self._build(self._environment, planned))
        return (await self._built[planned.group])[planned.member]

    async def _build(self, builder: GroupBuilder, planned: Planned) -> Sequence[Environment]:
        made: Sequence[Environment] = await called(builder.environments, planned.task, self._size, planned.seed)
        if len(made) != self._size:
            raise ValueError(f"{type(builder).__name__} made {len(made)} environments for a group of {self._size}")
        return made

    def _live(self) -> dict[str, float]:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return {
            "tokens/s": self._batcher.statistics.tokens / seconds,
            "steps": self._steps / len(self._done),
            "failed": float(self._failed),
        }

    def _result(self) -> Rollouts:
        kept = [self._done[i] for i in sorted(self._done) if self._members[self._plan[i].group] == self._size]
        seconds = time.monotonic() - self._started
        sampler = self._batcher.statistics
        if self._shared or not sampler.calls:  # counts those of all collections that share it, or none of agents
            sampler = SamplerStatistics(tokens=sum(each.num_tokens for each in kept))
        return summarised(kept, len(self._plan) - len(kept), seconds, sampler)


class RolloutOptions(TypedDict, total=False):
    """The keyword arguments of :class:`RolloutManager`.

    Attributes:
        num_parallel: Episodes in progress at once; 64 by default.
        max_steps_per_rollout: Truncate an episode after this many steps; 16 by default.
        group_size: Episodes per task; 1 by default.
        min_trajectories: Return as soon as whole groups with this many trajectories are complete, and drop the rest;
            None, the default, waits for all.
        maintain_parallel_count: False: the next ``num_parallel`` episodes start when all of the last have ended. True
            by default.
        params: Sampling parameters.
        timeout_s: Time limit per episode; None by default.
        template: Formats conversations; the model's own chat template by default.
        context_tokens: Maximum prompt length; older text is dropped from the beginning. None by default.
        seed: Seed of environments and sampling; 0 by default.
        deterministic: The same seed gives the same trajectories whatever the timing, if the sampler is itself
            deterministic; batches then wait for the slowest environment step. True by default.
        straggler_s: Limit of that wait, after which the other episodes go on; 5 by default, None waits without limit.
        max_batch: Maximum number of prompts per sampler call; 256 by default.
        partial_tokens: Tokens of a response per request to the sampler: what is longer goes on with newer weights, if
            there are any by then. None, the default: a response is of one policy.
        patience_s: How long an unreachable sampler is retried; 60 by default.
        progress_bar: Show a line with live statistics; False by default.
    """

    num_parallel: int
    max_steps_per_rollout: int
    group_size: int
    min_trajectories: int | None
    maintain_parallel_count: bool
    params: SamplingParams | None
    timeout_s: float | None
    template: ChatTemplate | None
    context_tokens: int | None
    seed: int
    deterministic: bool
    straggler_s: float | None
    max_batch: int
    partial_tokens: int | None
    patience_s: float
    progress_bar: bool


class RolloutManager:
    """Collects trajectories.

    Up to ``num_parallel`` episodes run at once. Requests of waiting episodes are sent to the sampler together, and
    a finished episode's slot is taken by the next one (``maintain_parallel_count``), so that long episodes do not leave
    the sampler idle. All members of a group start from the same task and environment seed.

    Args:
        inference: The sampler.
        environment: The environment, or a :class:`~gradwire.rl.environments.GroupBuilder`, which makes one per member.
        options: ``num_parallel``, ``group_size``, ``params`` and others: see :class:`RolloutOptions`.
    """

    def __init__(
        self,
        inference: InferenceModule,
        environment: Environment | GroupBuilder,
        **options: Unpack[RolloutOptions],
    ) -> None:
        check_options(RolloutOptions, options, type(self))
        names = ("num_parallel", "group_size", "max_batch", "partial_tokens")
        counts = {name: value for name, value in options.items() if name in names and value is not None}
        for name, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.inference = inference
        self.environment = environment
        self.params = options.get("params") or SamplingParams()
        self.group_size = options.get("group_size", 1)
        self.seed = options.get("seed", 0)
        self._num_parallel = options.get("num_parallel", 64)
        self._options = options
        self._collections = 0

    async def collect(
        self,
        tasks: Iterable[AnyTask],
        *,
        group_size: int | None = None,
        params: SamplingParams | None = None,
        seed: int | None = None,
        first_group: int = 0,
        batcher: GenerationBatcher | None = None,
    ) -> Rollouts:
        """Collect episodes of these tasks.

        Args:
            tasks: See :meth:`~gradwire.rl.types.Task.of`.
            group_size: Replaces the manager's own.
            params: Replace the manager's own.
            seed: Seed of this collection; by default derived from the manager's seed and the number of earlier
                collections.
            first_group: Number of the first group; numbers and seeds of groups count from it.
            batcher: A shared batcher (:meth:`batcher`) if several collections run at once; by default a new one.
        """
        size = group_size or self.group_size
        seed = derive_seed(self.seed, "collection", self._collections) if seed is None else seed
        self._collections += 1
        plan = [
            Planned(Task.of(task), group, member, derive_seed(seed, "group", group))
            for group, task in enumerate(tasks, first_group)
            for member in range(size)
        ]
        pace = Pace(
            max(self._num_parallel, size) if self._interactive else self._num_parallel,
            len(plan) if self._options.get("maintain_parallel_count", True) else self._num_parallel,
            self._options.get("min_trajectories"),
        )
        episodes = EpisodeRuns(
            plan,
            size,
            self.environment,
            functools.partial(self.worker, params=params or self.params),
            batcher or self.batcher(derive_seed(seed, "sampling", first_group)),
            functools.partial(self.batcher, derive_seed(seed, "others", first_group), deterministic=batcher is None),
            shared=batcher is not None,
            pace=pace,
            show=self._options.get("progress_bar", False),
        )
        return await episodes.run()

    @property
    def _interactive(self) -> bool:
        return isinstance(self.environment, GroupBuilder) and self.environment.interactive

    def worker(
        self, environment: Environment, other: InferenceModule | None = None, *, params: SamplingParams
    ) -> RLRolloutWorker:
        """Make the worker that runs the episodes of an environment; ``other``: a sampler instead of the manager's."""
        inference = other or self.inference

        def new_history() -> TokenHistory:
            return TokenHistory(inference.codec, options.get("template"), context_tokens=options.get("context_tokens"))

        options = self._options
        steps, timeout_s = options.get("max_steps_per_rollout", 16), options.get("timeout_s")
        return RLRolloutWorker(
            environment, params, new_history, inference=inference, max_steps=steps, timeout_s=timeout_s
        )

    def batcher(
        self, seed: int, inference: InferenceModule | None = None, *, deterministic: bool = True
    ) -> GenerationBatcher:
        """Make a batcher that sends the prompts of episodes to the sampler together."""
        return GenerationBatcher(
            inference or self.inference,
            seed=seed,
            deterministic=deterministic and self._options.get("deterministic", True) and not self._interactive,
            max_batch=self._options.get("max_batch", 256),
            patience_s=self._options.get("patience_s", 60.0),
            straggler_s=self._options.get("straggler_s", 5.0),
            partial_tokens=self._options.get("partial_tokens"),
        )
