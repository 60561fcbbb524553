"""The result of a collection: trajectories and their statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gradwire.rl.batching import SamplerStatistics
from gradwire.rl.metrics import Max, Mean, Metric, Sum, values_of
from gradwire.rl.types import Trajectory


@dataclass(frozen=True)
class RolloutStatistics:
    """Statistics of a collection.

    Attributes:
        trajectories: Number of returned trajectories.
        completed, failed, timeout: Number of trajectories by status; those that were cut are not among the completed.
        truncated: Number of those that a limit cut off: of the episode, or of its last response (``max_tokens``).
        dropped: Episodes planned or started, and dropped when ``min_trajectories`` were reached.
        avg_trajectory_length: Mean number of steps.
        max_trajectory_length: Maximum number of steps.
        avg_tokens: Mean number of policy tokens per trajectory.
        tokens_per_second: Sampled tokens per second.
        seconds: Duration of the whole collection.
        sampler: Counters of the sampler.
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
        """Mean number of prompts per sampler call."""
        return self.sampler.requests / max(self.sampler.calls, 1)

    def metrics(self) -> dict[str, float]:
        """The statistics as numbers by name, for loggers."""
        times = {"rollouts/seconds": self.seconds, "rollouts/tokens_per_second": self.tokens_per_second}
        return values_of(self.merging()) | times

    def merging(self) -> dict[str, Metric]:
        """The statistics as metrics that merge with those of other collections, but for the times."""
        counts = ("trajectories", "completed", "truncated", "failed", "timeout", "dropped")
        result: dict[str, Metric] = {f"rollouts/{name}": Sum(getattr(self, name)) for name in counts}
        for name in ("avg_trajectory_length", "avg_tokens"):
            result[f"rollouts/{name}"] = Mean(getattr(self, name) * self.trajectories, self.trajectories)
        result["rollouts/max_trajectory_length"] = Max(self.max_trajectory_length)
        if self.sampler.calls:  # unknown for a collection that shares its sampler
            result["rollouts/avg_batch"] = Mean(self.sampler.requests, self.sampler.calls)
        return result | {"rollouts/sampler_retries": Sum(self.sampler.retries)}


@dataclass(frozen=True)
class Rollouts:
    """Trajectories; members of a group are adjacent, and groups are in the order of the tasks."""

    trajectories: list[Trajectory]
    statistics: RolloutStatistics
    errors: dict[str, int] = field(default_factory=dict)

    def groups(self) -> list[list[Trajectory]]:
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        return list(groups.values())


def summarised(trajectories: list[Trajectory], dropped: int, seconds: float, sampler: SamplerStatistics) -> Rollouts:
    """Combine trajectories with their statistics."""
    status = [each.status for each in trajectories]
    steps = [len(each.steps) for each in trajectories]
    statistics = RolloutStatistics(
        trajectories=len(trajectories),
        completed=sum(each.status == "completed" and not each.was_cut for each in trajectories),
        truncated=sum(each.status in ("completed", "truncated") and each.was_cut for each in trajectories),
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
