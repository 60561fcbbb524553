"""Builders that make the environments of a group together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType

from gradwire.rl.environments.base import Environment
from gradwire.rl.generation import InferenceModule
from gradwire.rl.types import Task


class GroupBuilder(ABC):
    """Makes the environments of a group of episodes, in place of one environment that serves all.

    Returning the same object for every member lets them share a costly resource (a container, an index). Different
    objects that know each other make one multi-agent episode: each member is one agent with its own trajectory; if one
    waits for another's move, its ``step`` is ``async`` and ``interactive`` is True.

    Attributes:
        interactive: Members wait for one another. All members of a group are then started together, and the sampler
            does not wait for waiting members, so that sampling depends on timing.
        inferences: The samplers of members that another policy plays, by number of the member; the manager's has the
            others. An algorithm trains only on what the manager's policy wrote.
    """

    interactive: bool = False
    inferences: Mapping[int, InferenceModule] = MappingProxyType({})

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
