"""Curricula: the choice of the next tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gradwire.data.stored import Viewed
from gradwire.rl.batching import derive_seed
from gradwire.rl.types import AnyTask, Task, Trajectory

Tasks = Iterable[AnyTask]


def as_tasks(tasks: Tasks) -> Sequence[Task]:
    """Convert to tasks; an empty set, or a single prompt instead of a list, is an error.

    Those of a :class:`~gradwire.data.stored.Viewed` are made when they are used, so that they may be more than memory
    holds.
    """
    if isinstance(tasks, str | Mapping):
        raise TypeError(f"tasks is one {type(tasks).__name__}; give a list of prompts, rows or tasks")
    result = Viewed(tasks, Task.of) if isinstance(tasks, Viewed) else [Task.of(task) for task in tasks]
    if not result:
        raise ValueError("there are no tasks; give at least one")
    return result


@runtime_checkable
class Curriculum(Protocol):
    """Chooses tasks and adapts to the results. ``state`` is JSON-serialisable, for checkpoints.

    What ``select`` gives depends only on the state and its arguments: a resumed training asks again for what was under
    way.
    """

    def select(self, iteration: int, count: int) -> list[Task]:
        """Choose the next ``count`` tasks; ``iteration`` is the number of choices before."""
        ...

    def update(self, trajectories: Sequence[Trajectory]) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


class ShuffledCurriculum:
    """All tasks in a new order each epoch: each comes once before any comes again."""

    def __init__(self, tasks: Tasks, *, seed: int = 0) -> None:
        self.tasks = as_tasks(tasks)
        self._seed = seed
        self._taken = 0
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def select(self, iteration: int, count: int) -> list[Task]:
        result = []
        for place in range(self._taken, self._taken + count):
            epoch, at = divmod(place, len(self.tasks))
            if epoch != self._epoch:
                seeded = np.random.default_rng(derive_seed(self._seed, "epoch", epoch))
                self._epoch, self._order = epoch, seeded.permutation(len(self.tasks))
            result.append(self.tasks[int(self._order[at])])
        self._taken += count
        return result

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Ignore the results."""

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load(self, state: Mapping[str, Any]) -> None:
        self._taken = int(state["taken"])


class StagedCurriculum:
    """Moves to the next stage when the mean reward of the last ``window`` trajectories reaches ``threshold``.

    Args:
        stages: Task sets, the easiest first.
        threshold: Mean reward that ends a stage.
        window: Number of trajectories averaged.
        seed: Seed of the order within a stage.
    """

    def __init__(self, stages: Sequence[Tasks], *, threshold: float = 0.8, window: int = 64, seed: int = 0) -> None:
        if not stages:
            raise ValueError("there are no stages; give at least one")
        self._stages = [ShuffledCurriculum(stage, seed=derive_seed(seed, index)) for index, stage in enumerate(stages)]
        self._threshold, self._window = threshold, window
        self.stage = 0
        self._recent: list[float] = []

    def select(self, iteration: int, count: int) -> list[Task]:
        return self._stages[self.stage].select(iteration, count)

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        self._recent = [*self._recent, *(each.reward for each in trajectories if each.ok)][-self._window :]
        full = len(self._recent) == self._window and float(np.mean(self._recent)) >= self._threshold
        if full and self.stage + 1 < len(self._stages):
            self.stage += 1
            self._recent = []

    def state(self) -> dict[str, Any]:
        orders = [stage.state() for stage in self._stages]
        return {"stage": self.stage, "recent": list(self._recent), "orders": orders}

    def load(self, state: Mapping[str, Any]) -> None:
        self.stage, self._recent = int(state["stage"]), list(state["recent"])
        for stage, order in zip(self._stages, state["orders"], strict=True):
            stage.load(order)


class SuccessCurriculum:
    """Prefers tasks that are sometimes solved: weight ``p (1 - p) + floor``, ``p`` a running mean of the reward.

    Args:
        tasks: The task set; rewards are read as success rates from 0 to 1.
        floor: Weight of tasks that are always or never solved.
        decay: Decay of the running mean; a new task starts at 1/2.
        seed: Seed of the choice.
    """

    def __init__(self, tasks: Tasks, *, floor: float = 0.05, decay: float = 0.7, seed: int = 0) -> None:
        self.tasks = as_tasks(tasks)
        self._floor, self._decay, self._seed = floor, decay, seed
        self.success = {task.key: 0.5 for task in self.tasks}

    def select(self, iteration: int, count: int) -> list[Task]:
        p = np.array([self.success[task.key] for task in self.tasks])
        weights = np.clip(p * (1 - p), 0, None) + self._floor
        rng = np.random.default_rng(derive_seed(self._seed, "select", iteration))
        replace = count > len(self.tasks)
        chosen = rng.choice(len(self.tasks), count, replace=replace, p=weights / weights.sum())
        return [self.tasks[index] for index in chosen]

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        rewards: dict[str, list[float]] = {}
        for each in trajectories:
            if each.ok and each.task.key in self.success:
                rewards.setdefault(each.task.key, []).append(each.reward)
        for key, values in rewards.items():
            self.success[key] = self._decay * self.success[key] + (1 - self._decay) * float(np.mean(values))

    def state(self) -> dict[str, Any]:
        return {"success": dict(self.success)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.success |= {key: float(value) for key, value in state["success"].items() if key in self.success}


def as_curriculum(tasks: Tasks | Curriculum, seed: int) -> Curriculum:
    """Return a curriculum unchanged; wrap tasks in a shuffled curriculum."""
    return tasks if isinstance(tasks, Curriculum) else ShuffledCurriculum(as_tasks(tasks), seed=seed)
