"""Rollouts over the processes and machines of a Ray cluster; needs ``gradwire[ray]``.

The sampler stays in its place (the gradwire server, or an endpoint); environments, tools and tokenizing are
distributed. A group always runs on one worker.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from gradwire.extras import require
from gradwire.rl.batching import SamplerStatistics, derive_seed
from gradwire.rl.environments.base import BaseEnvironment
from gradwire.rl.generation import InferenceModule, SamplingParams
from gradwire.rl.rollout_statistics import Rollouts, summarised
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import AnyTask, Task, Trajectory

logger = logging.getLogger("gradwire.rl")

MakeInference = Callable[[], InferenceModule | Awaitable[InferenceModule]]


class _Collector:
    """A Ray actor that creates and runs its own rollout manager."""

    def __init__(
        self, make_inference: MakeInference, make_environment: Callable[[], BaseEnvironment], options: Mapping[str, Any]
    ) -> None:
        self._make_inference, self._make_environment, self._options = make_inference, make_environment, options
        self._manager: RolloutManager | None = None

    async def collect(self, tasks: Sequence[Task], settings: Mapping[str, Any]) -> Rollouts:
        if self._manager is None:
            inference = self._make_inference()
            made = await inference if inspect.isawaitable(inference) else inference
            self._manager = RolloutManager(made, self._make_environment(), **self._options)
        rollouts = await self._manager.collect(tasks, **settings)
        for each in rollouts.trajectories:
            # A state may hold objects that cannot be pickled, such as an environment's handle.
            if each.state is not None:
                plain = {name: value for name, value in each.state.data.items() if isinstance(value, PLAIN)}
                each.state = type(each.state)(
                    each.state.task,
                    each.state.messages,
                    each.state.step,
                    each.state.terminated,
                    each.state.truncated,
                    plain,
                )
        return rollouts


PLAIN = (str, int, float, bool, type(None), tuple, list, dict)


class RayRolloutManager:
    """A :class:`~gradwire.rl.rollouts.RolloutManager` over Ray workers, with the same ``collect``.

    Each worker gets whole groups, one contiguous share. The environments' seeds do not depend on the number of
    workers; sampling seeds do. If a worker dies it is replaced and its share is collected once more; if that fails, its
    trajectories are ``failed``.

    Args:
        make_inference: Makes the sampler in each worker, e.g. connects to the server and returns a ``RunInference``
            over ``service.sampling_client``, or an ``OpenAIInference``. May be ``async``.
        make_environment: Makes the environment in each worker.
        num_workers: Number of Ray actors.
        group_size: Episodes per task.
        params: Sampling parameters.
        seed: Seed of environments and sampling.
        ray_options: Options of each actor, e.g. ``{"num_cpus": 1, "resources": {...}}``.
        options: Options of each worker's :class:`~gradwire.rl.rollouts.RolloutManager`; ``num_parallel`` is per worker.
    """

    def __init__(
        self,
        make_inference: MakeInference,
        make_environment: Callable[[], BaseEnvironment],
        *,
        num_workers: int = 2,
        group_size: int = 1,
        params: SamplingParams | None = None,
        seed: int = 0,
        ray_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self._ray = require("ray", "ray", "RayRolloutManager")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        actor = self._ray.remote(_Collector)
        self._actor = actor.options(**ray_options) if ray_options else actor
        self._made = (make_inference, make_environment, options)
        self._workers = [self._actor.remote(*self._made) for _ in range(num_workers)]
        self.group_size, self.params, self.seed = group_size, params or SamplingParams(), seed
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
        """Collect episodes of these tasks: see :meth:`~gradwire.rl.rollouts.RolloutManager.collect`."""
        started = time.monotonic()
        chosen, size = [Task.of(task) for task in tasks], group_size or self.group_size
        seed = derive_seed(self.seed, "collection", self._collections) if seed is None else seed
        self._collections += 1
        share = -(-len(chosen) // len(self._workers))
        settings = {"group_size": size, "params": params or self.params, "seed": seed}
        parts = await asyncio.gather(
            *(
                self._part(number, chosen[at : at + share], {**settings, "first_group": first_group + at})
                for number, at in enumerate(range(0, len(chosen), max(share, 1)))
            )
        )
        sampler = SamplerStatistics()
        for part in parts:
            for name, value in vars(part.statistics.sampler).items():
                setattr(sampler, name, getattr(sampler, name) + value)
        trajectories = [each for part in parts for each in part.trajectories]
        dropped = sum(part.statistics.dropped for part in parts)
        return summarised(trajectories, dropped, time.monotonic() - started, sampler)

    async def _part(self, number: int, tasks: Sequence[Task], settings: Mapping[str, Any]) -> Rollouts:
        died = ""
        for _ in range(2):
            try:
                rollouts: Rollouts = await self._workers[number].collect.remote(tasks, settings)
                return rollouts
            except self._ray.exceptions.RayActorError as error:
                died = f"the worker died: {str(error).splitlines()[0]}"
                logger.warning("rollout worker %d: %s", number, died)
                self._workers[number] = self._actor.remote(*self._made)
        lost = [
            Trajectory(task, settings["first_group"] + index, member, status="failed", error=died)
            for index, task in enumerate(tasks)
            for member in range(settings["group_size"])
        ]
        return summarised(lost, 0, 0.0, SamplerStatistics())

    def close(self) -> None:
        """Stop the workers; the cluster keeps running."""
        for worker in self._workers:
            self._ray.kill(worker)
