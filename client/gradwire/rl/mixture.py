"""Several kinds of tasks in one training, each with its environment, reward and share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradwire.rl.batching import derive_seed
from gradwire.rl.curricula import Curriculum, Tasks, as_curriculum
from gradwire.rl.environments.base import Environment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.environments.text import SimpleTextEnvironment
from gradwire.rl.rewards.computer import Reward, as_computer
from gradwire.rl.threads import called
from gradwire.rl.types import EvaluateResult, Task, Trajectory

KIND = "mixture"
"""Key of a task's ``data`` that holds the name of its part."""


@dataclass(frozen=True)
class Part:
    """One kind of tasks.

    Attributes:
        tasks: A task set or a curriculum.
        reward: The reward function or scorer; returns absolute scores.
        environment: The environment, or a builder that makes one per group member.
        weight: The part's share of the tasks is its weight over the sum of all weights.
    """

    tasks: Tasks | Curriculum
    reward: Reward
    environment: Environment | GroupBuilder = field(default_factory=SimpleTextEnvironment)
    weight: float = 1.0


class Mixture:
    """Named parts, combined into an algorithm's :attr:`curriculum`, :attr:`environment` and :attr:`reward`.

    ``GRPOAlgorithm(service, run, mixture.curriculum, mixture.reward, environment=mixture.environment)``. The metrics
    ``rewards/NAME`` are the parts' mean scores.

    Args:
        parts: The parts by name.
        seed: Seed of the choice between parts.
    """

    def __init__(self, parts: Mapping[str, Part], *, seed: int = 0) -> None:
        if not parts:
            raise ValueError("a mixture has no parts; name at least one")
        for name, part in parts.items():
            if not part.weight > 0:
                raise ValueError(f"the weight of {name} must be above 0, got {part.weight}")
        self.curriculum = _MixedCurriculum(
            {name: as_curriculum(part.tasks, derive_seed(seed, name)) for name, part in parts.items()},
            [part.weight for part in parts.values()],
            seed,
        )
        self.environment = _MixedEnvironment({name: part.environment for name, part in parts.items()})
        self.reward = _MixedReward({name: part.reward for name, part in parts.items()})


class _MixedCurriculum:
    def __init__(self, parts: Mapping[str, Curriculum], weights: Sequence[float], seed: int) -> None:
        self._parts, self._seed = parts, seed
        self._shares = np.array(weights, np.float64) / sum(weights)

    def select(self, iteration: int, count: int) -> list[Task]:
        names = list(self._parts)
        rng = np.random.default_rng(derive_seed(self._seed, "mixture", iteration))
        chosen = rng.choice(len(names), count, p=self._shares)
        counts = np.bincount(chosen, minlength=len(names)).tolist()
        left = {name: iter(self._parts[name].select(iteration, n)) for name, n in zip(names, counts) if n}
        return [_named(next(left[names[place]]), names[place]) for place in chosen]

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        for name, part in self._parts.items():
            part.update([_as_of_part(each) for each in trajectories if each.task.data.get(KIND) == name])

    def state(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self._parts.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load(state[name])


def _named(task: Task, name: str) -> Task:
    return replace(task, task_id=f"{name}/{task.key}", data={**task.data, KIND: name})


def _as_of_part(trajectory: Trajectory) -> Trajectory:
    """Convert a trajectory's task to the form that its part expects."""
    key = trajectory.task.task_id.partition("/")[2]
    return replace(trajectory, task=replace(trajectory.task, task_id=key))


class _MixedEnvironment(GroupBuilder):
    def __init__(self, parts: Mapping[str, Environment | GroupBuilder]) -> None:
        self._parts = parts
        self.interactive = any(isinstance(part, GroupBuilder) and part.interactive for part in parts.values())

    async def environments(self, task: Task, size: int, seed: int) -> Sequence[Environment]:
        part = self._parts[_kind(task, self._parts)]
        if not isinstance(part, GroupBuilder):
            return [part] * size
        made: Sequence[Environment] = await called(part.environments, task, size, seed)
        return made


class _MixedReward:
    def __init__(self, parts: Mapping[str, Reward]) -> None:
        self._parts = {name: as_computer(part) for name, part in parts.items()}

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        results: dict[int, EvaluateResult] = {}

        async def score(name: str) -> None:
            at = [index for index, each in enumerate(trajectories) if _kind(each.task, self._parts) == name]
            verdicts = await self._parts[name].scorer.evaluate([trajectories[index] for index in at]) if at else []
            for index, verdict in zip(at, verdicts, strict=True):
                results[index] = replace(verdict, metrics={**verdict.metrics, name: verdict.score})

        await asyncio.gather(*map(score, self._parts))
        return [results[index] for index in range(len(trajectories))]

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


def _kind(task: Task, parts: Mapping[str, Any]) -> str:
    name = task.data.get(KIND)
    if name not in parts:
        raise ValueError(
            f"the task {task.key!r:.100} belongs to no part of the mixture ({', '.join(parts)}): its data has no "
            f'"{KIND}". Held-out tasks need it too: Task(..., data={{"{KIND}": "{next(iter(parts))}"}})'
        )
    return str(name)
