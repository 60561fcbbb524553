"""Collect many episodes of different lengths at once over one sampler."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypedDict, Unpack

from gradwire.rl.batching import GenerationBatcher, derive_seed
from gradwire.rl.environments.base import Environment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.episode_runs import EpisodeRuns, Pace, Planned
from gradwire.rl.generation import InferenceModule, SamplingParams
from gradwire.rl.prompts import ChatTemplate, TokenHistory
from gradwire.rl.rollout_statistics import Rollouts
from gradwire.rl.types import AnyTask, Task
from gradwire.rl.worker import RLRolloutWorker
from gradwire.wire.options import check_options


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
