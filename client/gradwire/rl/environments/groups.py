"""Builders that make the environments of a group together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence

from gradwire.rl.environments.base import Environment
from gradwire.rl.types import Task


class GroupBuilder(ABC):
    """Makes the environments of a group of episodes, in place of one environment that serves all.

    Returning the same object for every member lets them share a costly resource (a container, an index). Different
    objects that know each other make one multi-agent episode: each member is one agent with its own trajectory; if one
    waits for another's move, its ``step`` is ``async`` and ``interactive`` is True.

    Attributes:
        interactive: Members wait for one another. All members of a group are then started together, and the sampler
            does not wait for waiting members, so that sampling depends on timing.
    """

    interactive: bool = False

    @abstractmethod
    def environments(
        self, task: Task, size: int, seed: int
    ) -> Sequence[Environment] | Awaitable[Sequence[Environment]]:
        """Make ``size`` environments, one per member.

        Args:
            task: The group's task.
            size: Number of members.
            seed: The group's seed; each environment is reset with it.
        """
