"""Collect many episodes of different lengths at once over one sampler."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from gradwire.rl.batching import GenerationBatcher, derive_seed
from gradwire.rl.environments.base import BaseEnvironment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.episode_runs import EpisodeRuns, Planned
from gradwire.rl.generation import InferenceModule, SamplingParams
from gradwire.rl.prompts import ChatTemplate, TokenHistory
from gradwire.rl.rollout_statistics import Rollouts
from gradwire.rl.types import AnyTask, Task
from gradwire.rl.worker import RLRolloutWorker


class RolloutManager:
    """Collects trajectories.

    Up to ``num_parallel`` episodes run at once. Requests of waiting episodes are sent to the sampler together, and
    a finished episode's slot is taken by the next one (``maintain_parallel_count``), so that long episodes do not leave
    the sampler idle. All members of a group start from the same task and environment seed.

    Args:
        inference: The sampler.
        environment: The environment, or a :class:`~gradwire.rl.environments.GroupBuilder`, which makes one per member.
        num_parallel: Episodes in progress at once.
        max_steps_per_rollout: Truncate an episode after this many steps.
        group_size: Episodes per task.
        min_trajectories: Return as soon as whole groups with this many trajectories are complete, and drop the rest;
            None waits for all.
        maintain_parallel_count: False: the next ``num_parallel`` episodes start when all of the last have ended.
        params: Sampling parameters.
        timeout_s: Time limit per episode.
        template: Formats conversations; the model's own chat template by default.
        context_tokens: Maximum prompt length; older text is dropped from the beginning.
        seed: Seed of environments and sampling.
        deterministic: The same seed gives the same trajectories whatever the timing, if the sampler is itself
            deterministic; batches then wait for the slowest environment step.
        straggler_s: Limit of that wait, after which the other episodes go on; None waits without limit.
        max_batch: Maximum number of prompts per sampler call.
        patience_s: How long an unreachable sampler is retried.
        progress_bar: Show a line with live statistics.
    """

    def __init__(
        self,
        inference: InferenceModule,
        environment: BaseEnvironment | GroupBuilder,
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
        straggler_s: float | None = 5.0,
        max_batch: int = 256,
        patience_s: float = 60.0,
        progress_bar: bool = False,
    ) -> None:
        for name, value in (("num_parallel", num_parallel), ("group_size", group_size), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
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
        episodes = EpisodeRuns(
            plan,
            size,
            self.environment,
            functools.partial(self.worker, params=params or self.params),
            batcher or self.batcher(derive_seed(seed, "sampling", first_group)),
            shared=batcher is not None,
            num_parallel=max(self._num_parallel, size) if self._interactive else self._num_parallel,
            wave=len(plan) if self._maintain else self._num_parallel,
            enough=self._min_trajectories,
            show=self._progress_bar,
        )
        return await episodes.run()

    @property
    def _interactive(self) -> bool:
        return isinstance(self.environment, GroupBuilder) and self.environment.interactive

    def worker(self, environment: BaseEnvironment, params: SamplingParams) -> RLRolloutWorker:
        """Make the worker that runs the episodes of an environment."""

        def new_history() -> TokenHistory:
            return TokenHistory(self.inference.codec, self._template, context_tokens=self._context_tokens)

        return RLRolloutWorker(environment, params, new_history, max_steps=self._max_steps, timeout_s=self._timeout_s)

    def batcher(self, seed: int, *, deterministic: bool = True) -> GenerationBatcher:
        """Make a batcher that sends the prompts of episodes to the sampler together."""
        return GenerationBatcher(
            self.inference,
            seed=seed,
            deterministic=deterministic and self._deterministic and not self._interactive,
            max_batch=self._max_batch,
            patience_s=self._patience_s,
            straggler_s=self._straggler_s,
        )
