"""Blocking rollouts of an environment."""

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
    """Settings of rollouts.

    Attributes:
        num_parallel: Episodes in progress at once.
        maintain_parallel_count: Start the next episode when one ends; False: the next ``num_parallel``
            start when all of the last have ended.
        verbose: Print a line about each collection.
        enable_progress_bar: Show a progress bar.
        max_steps_per_rollout: Truncate an episode after this many steps.
        timeout_s: Time limit per episode.
        seed: Seed of sampling and of the environments' ``rng``.
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
        env: The environment, with its ``inference``.
        config: The settings.
        settings: Fields of :class:`RolloutConfig`, instead of a config or overriding it.
    """

    def __init__(self, env: BaseEnvironment, config: RolloutConfig | None = None, **settings: Any) -> None:
        self.env = env
        self.config = RolloutConfig(**(asdict(config) if config else {}) | settings)
        self._started = 0
        self._statistics: RolloutStatistics | None = None

    def collect_rollouts(
        self, min_trajectories: int | None = None, max_steps_per_rollout: int | None = None
    ) -> list[Trajectory]:
        """Collect this many episodes (``num_parallel`` by default), using the environment's prompts in turn.

        Failed episodes are left out; the log has the reasons, the statistics the number.

        Raises:
            RuntimeError: All episodes failed; the message has the first error.
        """
        config, count = self.config, min_trajectories or self.config.num_parallel
        if self.env.inference is None:
            raise ValueError(f"{type(self.env).__name__} has no inference; pass one: Environment(inference=...)")
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
        """Return statistics of the last collection: ``avg_trajectory_length`` (steps), ``tokens_per_second``, …

        The names are the fields of :class:`~gradwire.rl.rollout_statistics.RolloutStatistics`.
        """
        if self._statistics is None:
            raise RuntimeError("nothing has been collected yet: call collect_rollouts first")
        return asdict(self._statistics)
