"""What came of a collection: trajectories, and figures of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from gradwire.rl.batching import SamplerStatistics
from gradwire.rl.types import Trajectory


@dataclass(frozen=True)
class RolloutStatistics:
    """Figures of a collection.

    Attributes:
        trajectories: how many came back.
        completed, truncated, failed, timeout: how they ended.
        dropped: started or planned, and given up when ``min_trajectories`` were there.
        avg_trajectory_length: steps.
        max_trajectory_length: steps.
        avg_tokens: that the policy wrote, a trajectory.
        tokens_per_second: sampled.
        seconds: of the whole collection.
        sampler: what the sampler did.
    """

    trajectories: int
    completed: int
    truncated: int
    failed: int
    timeout: int
    dropped: int
    avg_trajectory_length: float
    max_trajectory_length: int
    avg_tokens: float
    tokens_per_second: float
    seconds: float
    sampler: SamplerStatistics

    @property
    def avg_batch(self) -> float:
        """Prompts a call of the sampler."""
        return self.sampler.requests / max(self.sampler.calls, 1)

    def metrics(self) -> dict[str, float]:
        """The figures as numbers by name, for loggers."""
        numbers = {name: value for name, value in asdict(self).items() if name != "sampler"}
        return {f"rollouts/{name}": float(value) for name, value in numbers.items()} | {
            "rollouts/avg_batch": self.avg_batch,
            "rollouts/sampler_retries": float(self.sampler.retries),
        }


@dataclass(frozen=True)
class Rollouts:
    """Trajectories, those of a group next to each other and groups in the tasks' order."""

    trajectories: list[Trajectory]
    statistics: RolloutStatistics
    errors: dict[str, int] = field(default_factory=dict)

    def groups(self) -> list[list[Trajectory]]:
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        return list(groups.values())


def summarised(trajectories: list[Trajectory], dropped: int, seconds: float, sampler: SamplerStatistics) -> Rollouts:
    """Trajectories with their statistics."""
    status = [each.status for each in trajectories]
    steps = [len(each.steps) for each in trajectories]
    statistics = RolloutStatistics(
        trajectories=len(trajectories),
        completed=status.count("completed"),
        truncated=status.count("truncated"),
        failed=status.count("failed"),
        timeout=status.count("timeout"),
        dropped=dropped,
        avg_trajectory_length=float(np.mean(steps)) if steps else 0.0,
        max_trajectory_length=max(steps, default=0),
        avg_tokens=float(np.mean([each.num_tokens for each in trajectories])) if trajectories else 0.0,
        tokens_per_second=sampler.tokens / max(seconds, 1e-9),
        seconds=seconds,
        sampler=sampler,
    )
    errors: dict[str, int] = {}
    for each in trajectories:
        if each.error:
            errors[each.error] = errors.get(each.error, 0) + 1
    return Rollouts(trajectories, statistics, errors)
