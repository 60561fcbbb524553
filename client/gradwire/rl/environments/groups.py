"""Whose environments the members of a group are: a builder makes them together, one mixture deals them by task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence

from gradwire.rl.environments.base import BaseEnvironment
from gradwire.rl.types import Task


class GroupBuilder(ABC):
    """Makes the environments of a group of episodes, in place of one environment that serves all.

    The same object for every member lets them share something costly (a container, an index). Different objects that
    know each other make one episode of several agents: each member is one agent, with a trajectory of its own; where
    one waits for another's move, its ``step`` is ``async`` and waits, and ``interactive`` is True.

    Attributes:
        interactive: members wait for one another. All of a group are then started together, and the sampler is not
            kept waiting for those that wait, so that sampling depends on timing.
    """

    interactive: bool = False

    @abstractmethod
    def environments(
        self, task: Task, size: int, seed: int
    ) -> Sequence[BaseEnvironment] | Awaitable[Sequence[BaseEnvironment]]:
        """One environment a member, ``size`` in all.

        Args:
            task: of the group.
            size: members.
            seed: of the group; each environment is reset with it.
        """
