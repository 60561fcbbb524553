"""Replay buffer of trajectories from earlier policies, for losses with importance weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from gradwire.rl.rewards.computer import by_group
from gradwire.rl.types import Trajectory


class ReplayBuffer:
    """Keeps the newest groups. Groups are stored, drawn and dropped as a whole, because their rewards belong together.

    Args:
        capacity: Maximum number of trajectories.
        max_age: Number of optimizer steps after which a group is no longer drawn; None keeps all.
        prefer_spread: Draw groups in proportion to the spread of their rewards (plus a floor), because groups of equal
            rewards give no gradient.
    """

    def __init__(self, capacity: int, *, max_age: int | None = None, prefer_spread: bool = False) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity, self._max_age, self._prefer_spread = capacity, max_age, prefer_spread
        self._groups: deque[list[Trajectory]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the groups, oldest first."""
        return [group[0].group for group in self._groups]

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the trainable groups; drop the oldest groups above the capacity."""
        self._groups.extend(by_group([each for each in trajectories if each.ok]))
        while len(self) > self._capacity and len(self._groups) > 1:
            self._groups.popleft()

    def clear(self) -> None:
        """Drop all groups."""
        self._groups.clear()

    def sample(self, groups: int, rng: np.random.Generator, *, version: int = 0) -> list[Trajectory]:
        """Draw up to this many different groups.

        Args:
            groups: Number of groups.
            rng: Random generator of the choice.
            version: Optimizer steps that the policy has taken now, for ``max_age``.
        """
        young = [g for g in self._groups if self._max_age is None or version - written_at(g) <= self._max_age]
        if not young:
            return []
        weights = np.array([np.std([each.reward for each in g]) + 0.01 if self._prefer_spread else 1.0 for g in young])
        chosen = rng.choice(len(young), min(groups, len(young)), replace=False, p=weights / weights.sum())
        return [trajectory for index in chosen for trajectory in young[index]]


def written_at(group: Sequence[Trajectory]) -> int:
    """Optimizer steps of the oldest policy that wrote any of the trajectory."""
    return min((step.policy_version for each in group for step in each.steps), default=0)
