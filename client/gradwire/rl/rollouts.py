"""Many episodes of different length at once, over one sampler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradwire.rl.batching import GenerationBatcher, derive_seed
from gradwire.rl.environments.base import BaseEnvironment
from gradwire.rl.generation import InferenceModule, SamplingParams
from gradwire.rl.progress import Progress
from gradwire.rl.prompts import ChatTemplate, TokenHistory, chat_template
from gradwire.rl.rollout_statistics import Rollouts, summarised
from gradwire.rl.types import AnyTask, Task, Trajectory
from gradwire.rl.worker import RLRolloutWorker


class RolloutManager:
    """Collects trajectories.

    Up to ``num_parallel`` episodes are under way. Those that wait for the policy are sent to the sampler together, and
    the place of one that ends is taken by the next (``maintain_parallel_count``), so that long episodes do not leave
    the sampler idle. All members of a group start from the same task and environment seed.

    Args:
        inference: the sampler.
        environment: the world.
        num_parallel: episodes under way at once.
        max_steps_per_rollout: an episode that the environment has not ended by then is truncated.
        group_size: episodes a task.
        min_trajectories: return as soon as whole groups of this many trajectories are there, and give up the rest;
            None waits for all.
        maintain_parallel_count: else the next ``num_parallel`` start when all of the last have ended.
        params: how to sample.
        timeout_s: of one episode.
        template: how conversations are written; the tokenizer's own by default.
        context_tokens: longest prompt; older text is dropped from its beginning.
        seed: of environments and sampling.
        deterministic: the same seed gives the same trajectories, whatever the timing, on a sampler that is itself
            deterministic; costs waiting for the slowest environment step.
        straggler_s: but for no longer than this, after which the others go on.
        max_batch: prompts a call of the sampler.
        patience_s: how long a sampler that is away is tried again.
        progress_bar: show a line with live statistics.
    """

    def __init__(
        self,
        inference: InferenceModule,
        environment: BaseEnvironment,
        *,
        num_parallel: int = 64,
        max_steps_per_rollout: int = 16,
        group_size: int = 1,
        min_trajectories: int | None = None,
        maintain_parallel_count: bool = True,
        params: SamplingParams | None = None,
        timeout_s: float | None = None,
        template: ChatTemplate | None = None,
        context_tokens: int | None = None,
        seed: int = 0,
        deterministic: bool = True,
        straggler_s: float = 5.0,
        max_batch: int = 256,
        patience_s: float = 60.0,
        progress_bar: bool = False,
    ) -> None:
        for name, value in (("num_parallel", num_parallel), ("group_size", group_size), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; this is {value}")
        self.inference = inference
        self.environment = environment
        self.params = params or SamplingParams()
        self.group_size = group_size
        self.seed = seed
        self._num_parallel = num_parallel
        self._max_steps = max_steps_per_rollout
        self._min_trajectories = min_trajectories
        self._maintain = maintain_parallel_count
        self._timeout_s = timeout_s
        self._template = template
        self._context_tokens = context_tokens
        self._deterministic = deterministic
        self._straggler_s = straggler_s
        self._max_batch = max_batch
        self._patience_s = patience_s
        self._progress_bar = progress_bar
        self._collections = 0

    async def collect(
        self,
        tasks: Iterable[AnyTask],
        *,
        group_size: int | None = None,
        params: SamplingParams | None = None,
        seed: int | None = None,
        first_group: int = 0,
    ) -> Rollouts:
        """Episodes of these tasks.

        Args:
            tasks: see :meth:`~gradwire.rl.types.Task.of`.
            group_size, params: in place of the manager's own.
            seed: of this collection; by default the manager's own and how many collections came before.
            first_group: number of the first group; numbers and seeds of groups count on from it.
        """
        size = group_size or self.group_size
        seed = derive_seed(self.seed, "collection", self._collections) if seed is None else seed
        self._collections += 1
        plan = [
            _Planned(Task.of(task), group, member, derive_seed(seed, "group", group))
            for group, task in enumerate(tasks, first_group)
            for member in range(size)
        ]
        collection = _Collection(
            plan,
            size,
            self.worker(params or self.params),
            self._batcher(derive_seed(seed, "sampling", first_group)),
            num_parallel=self._num_parallel,
            wave=len(plan) if self._maintain else self._num_parallel,
            enough=self._min_trajectories,
            show=self._progress_bar,
        )
        return await collection.run()

    def worker(self, params: SamplingParams) -> RLRolloutWorker:
        """What runs the episodes."""
        stop = tuple(dict.fromkeys((*params.stop, *self.environment.stop)))
        template = self._template or chat_template(self.inference.codec)

        def new_history() -> TokenHistory:
            return TokenHistory(self.inference.codec, template, context_tokens=self._context_tokens)

        sampling = replace(params, stop=stop)
        return RLRolloutWorker(
            self.environment, sampling, new_history, max_steps=self._max_steps, timeout_s=self._timeout_s
        )

    def _batcher(self, seed: int) -> GenerationBatcher:
        return GenerationBatcher(
            self.inference,
            seed=seed,
            deterministic=self._deterministic,
            max_batch=self._max_batch,
            patience_s=self._patience_s,
            straggler_s=self._straggler_s,
        )


@dataclass(frozen=True)
class _Planned:
    """An episode to come; ``seed`` is its environment's."""

    task: Task
    group: int
    member: int
    seed: int


class _Collection:
    """One call of :meth:`RolloutManager.collect`.

    Args:
        plan: all episodes, group by group.
        group_size: episodes a group.
        num_parallel: episodes under way at once.
        wave: episodes after whose last the next may begin.
        enough: trajectories, in whole groups, that end the collection.
        show: a progress bar.
    """

    def __init__(
        self,
        plan: list[_Planned],
        group_size: int,
        worker: RLRolloutWorker,
        batcher: GenerationBatcher,
        *,
        num_parallel: int,
        wave: int,
        enough: int | None,
        show: bool,
    ) -> None:
        self._plan, self._size, self._worker, self._batcher = plan, group_size, worker, batcher
        self._num_parallel, self._wave_size, self._enough = num_parallel, wave, enough
        self._done: dict[int, Trajectory] = {}
        self._members: dict[int, int] = {}
        self._complete = self._steps = self._failed = 0
        self._progress = Progress("rollouts", len(plan), show=show)
        self._started = time.monotonic()

    async def run(self) -> Rollouts:
        try:
            with self._progress:
                for start in range(0, len(self._plan), max(self._wave_size, 1)):
                    stop = min(start + self._wave_size, len(self._plan))
                    if not await self._wave(iter(range(start, stop)), min(self._num_parallel, stop - start)):
                        break
        finally:
            await self._batcher.close()
        return self._result()

    async def _wave(self, indices: Iterator[int], places: int) -> bool:
        """Runs these episodes; False when enough trajectories are there before they all ended."""
        enough = asyncio.Event()
        # All places are taken before any episode runs, lest the first believe itself alone.
        first = [next(indices) for _ in range(places)]
        for index in first:
            self._batcher.enter(index)
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
            if self._enough is not None and self._complete >= self._enough:
                enough.set()
            # The next one enters before the last one leaves: the place is never empty between them.
            following = next(indices, None)
            if following is not None:
                self._batcher.enter(following)
            self._batcher.leave(index)
            index = following

    async def _episode(self, index: int) -> None:
        planned = self._plan[index]
        group = planned.group
        trajectory = await self._worker.run(
            planned.task,
            lambda prompt, params: self._batcher.generate(index, prompt, params),
            group=group,
            member=planned.member,
            seed=planned.seed,
        )
        self._done[index] = trajectory
        self._steps += len(trajectory.steps)
        self._failed += trajectory.status in ("failed", "timeout")
        self._members[group] = self._members.get(group, 0) + 1
        if self._members[group] == self._size:
            self._complete += self._size
        self._progress.update(len(self._done), self._live())

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
        return summarised(kept, len(self._plan) - len(kept), seconds, self._batcher.statistics)
