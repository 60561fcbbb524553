"""Rollouts of an environment, collected while the script waits."""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.rl.primitives.background import wait_for
from gradwire.rl.primitives.environments import BaseEnvironment
from gradwire.rl.primitives.running import EpisodeEnvironment
from gradwire.rl.rollout_statistics import RolloutStatistics
from gradwire.rl.rollouts import RolloutManager as AsyncRolloutManager
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")


@dataclass(frozen=True)
class RolloutConfig:
    """How rollouts are collected.

    Attributes:
        num_parallel: episodes under way at once.
        maintain_parallel_count: the place of an episode that ends is taken by the next; else the next ``num_parallel``
            start when all of the last have ended.
        verbose: print a line about each collection.
        enable_progress_bar: show one.
        max_steps_per_rollout: an episode that is not over by then is truncated.
        timeout_s: of one episode.
        seed: of sampling and of the environments' ``rng``.
    """

    num_parallel: int = 16
    maintain_parallel_count: bool = True
    verbose: bool = False
    enable_progress_bar: bool = False
    max_steps_per_rollout: int = 16
    timeout_s: float | None = None
    seed: int = 0


class RolloutManager:
    """Collects trajectories of an environment, many at once.

    Args:
        env: the environment, with its ``inference``.
        config: settings.
        settings: fields of :class:`RolloutConfig`, in place of a config or over it.
    """

    def __init__(self, env: BaseEnvironment, config: RolloutConfig | None = None, **settings: Any) -> None:
        self.env = env
        self.config = RolloutConfig(**(asdict(config) if config else {}) | settings)
        self._started = 0
        self._statistics: RolloutStatistics | None = None

    def collect_rollouts(
        self, min_trajectories: int | None = None, max_steps_per_rollout: int | None = None
    ) -> list[Trajectory]:
        """Trajectories of so many episodes (``num_parallel`` by default), the environment's prompts in turn.

        Those that failed are left out; why is in the log, how many in the statistics.

        Raises:
            RuntimeError: when all of them failed, with the first error.
        """
        config, count = self.config, min_trajectories or self.config.num_parallel
        if self.env.inference is None:
            raise ValueError(f"{type(self.env).__name__} has no inference; give it one: Environment(inference=...)")
        manager = AsyncRolloutManager(
            self.env.inference.backend,
            EpisodeEnvironment(self.env),
            num_parallel=config.num_parallel,
            max_steps_per_rollout=max_steps_per_rollout or config.max_steps_per_rollout,
            maintain_parallel_count=config.maintain_parallel_count,
            timeout_s=config.timeout_s,
            params=self.env.inference.params,
            seed=config.seed + self._started,
            progress_bar=config.enable_progress_bar,
        )
        tasks = list(itertools.islice(self.env.tasks(self._started), count))
        rollouts = wait_for(manager.collect(tasks, first_group=self._started))
        self._started += count
        self._statistics = rollouts.statistics
        ran = [each for each in rollouts.trajectories if each.status in ("completed", "truncated")]
        for error, times in rollouts.errors.items():
            logger.warning("%d of %d episodes failed: %s", times, count, error)
        if not ran:
            raise RuntimeError(f"all {count} episodes failed: {next(iter(rollouts.errors), 'no error was told')}")
        if config.verbose:
            figures = rollouts.statistics
            print(
                f"{len(ran)} of {count} episodes, {figures.avg_trajectory_length:.1f} steps and "
                f"{figures.avg_tokens:.0f} tokens each, {figures.tokens_per_second:.0f} tokens/s"
            )
        return ran

    def get_statistics(self) -> dict[str, Any]:
        """Figures of the last collection: ``avg_trajectory_length`` (steps), ``tokens_per_second``, ``failed``, …

        They are the fields of :class:`~gradwire.rl.rollout_statistics.RolloutStatistics`.
        """
        if self._statistics is None:
            raise RuntimeError("nothing has been collected yet: call collect_rollouts first")
        return asdict(self._statistics)
