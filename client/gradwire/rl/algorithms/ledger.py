"""The ledger of a training: each task that was given out, and what became of its group of trajectories."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.rl.curricula import Curriculum
from gradwire.rl.group_log import GroupLog, read_group
from gradwire.rl.metrics import Metric
from gradwire.rl.types import Task, Trajectory

logger = logging.getLogger("gradwire.rl")

TRAINED = "trained"


@dataclass(eq=False)
class Group:
    """A task that was given out.

    Attributes:
        number: Its place in the order of the tasks, from 0. Seeds and the trajectories' ``group`` come from it.
        task: The task.
        turn: The ledger's, when its collection began, also in an earlier process; None: it has not begun in this call.
        collected: Its place in the order of completion; None: it is not collected.
        trajectories: Its scored trajectories.
        metrics: Metrics of its collection.
    """

    number: int
    task: Task
    turn: int | None = None
    collected: int | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether any of its trajectories can be trained on."""
        return any(each.ok for each in self.trajectories)


@dataclass(frozen=True)
class _Choice:
    """Tasks that the curriculum chose at once, from group ``first`` on; the number of the choice, and the curriculum's
    state before."""

    place: int
    first: int
    count: int
    state: Mapping[str, Any]


class Ledger:
    """Gives out the tasks of a curriculum, each once, and keeps the groups until they are trained on or dropped.

    Its :meth:`state` is JSON data; with the log of collected groups it is all that a training needs to go on.

    Args:
        curriculum: Chooses the tasks.
        block: Tasks that it chooses at once.
        group_size: Trajectories per group.
        log: Where collected groups are written.
        replayed: Returns the numbers of settled groups whose trajectories are still used.

    Attributes:
        open: Groups that were given out and are neither trained on nor dropped, by number.
        turn: Number of parts of iterations that were handed out.
        settled: Number of groups by what became of them: ``trained``, or the reason why they were dropped.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        block: int,
        group_size: int,
        log: GroupLog,
        replayed: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.curriculum, self._block, self._group_size, self._log = curriculum, block, group_size, log
        self._replayed = replayed
        self.open: dict[int, Group] = {}
        self.settled: Counter[str] = Counter()
        self._choices: list[_Choice] = []
        self._tasks: dict[int, Task] = {}
        self._chosen = self._next = self.turn = 0
        self._logged: dict[int, tuple[int, str]] = {}
        self._entering: set[Group] = set()  # which are being logged

    def give_out(self, count: int) -> None:
        """Open the groups of the next tasks."""
        for number in range(self._next, self._next + count):
            if number not in self._tasks:
                self._choose(number)
            self._open(number)
        self._next += count

    def _choose(self, first: int) -> None:
        state = copy.deepcopy(self.curriculum.state())
        tasks = self.curriculum.select(self._chosen, self._block)
        if not tasks:
            raise ValueError(f"{type(self.curriculum).__name__}.select() gave no tasks")
        self._choices.append(_Choice(self._chosen, first, len(tasks), state))
        self._chosen += 1
        self._tasks |= dict(enumerate(tasks, first))

    def _open(self, number: int) -> None:
        group = self.open[number] = Group(number, self._tasks[number])
        order, content = self._logged.pop(number, (0, ""))
        read = read_group(content, group.task)
        if read is not None and len(read[0]) == self._group_size:
            (group.trajectories, group.metrics, group.turn), group.collected = read, order

    async def collect(self, groups: Mapping[Group, tuple[list[Trajectory], Mapping[str, Metric]]]) -> None:
        """Enter the trajectories of groups, and log them; groups without any that ran are not logged."""
        places = {group: next(self._log.places) for group in groups}
        ran = [group for group, (trajectories, _) in groups.items() if any(each.ok for each in trajectories)]
        if ran and self._log.path is not None:
            self._entering |= {*ran}
            try:
                collected = [(group.number, group.turn, group.task, *groups[group]) for group in ran]
                places |= zip(ran, await self._log.add(collected), strict=True)
            finally:
                self._entering -= {*ran}
        for group, (trajectories, metrics) in groups.items():
            group.trajectories, group.metrics, group.collected = trajectories, metrics, places[group]

    def forget(self, groups: Sequence[Group]) -> None:
        """Let these groups be collected again."""
        for group in groups:
            group.trajectories, group.metrics, group.collected = [], {}, None

    def settle(self, groups: Sequence[Group], outcome: str) -> None:
        """Close groups that were trained on, or are dropped for a reason; the curriculum hears of their rewards."""
        self.curriculum.update([each for group in groups for each in group.trajectories])
        for group in groups:
            del self.open[group.number], self._tasks[group.number]
            self.settled[outcome] += 1
            if outcome != TRAINED:
                level = logging.INFO if outcome == "without_spread" else logging.WARNING
                logger.log(level, "the task %.100r is dropped: group %d %s", group.task.key, group.number, outcome)
        needed = {*self._tasks, *self._replayed()}
        self._choices = [
            each for each in self._choices if not needed.isdisjoint(range(each.first, each.first + each.count))
        ]

    def counts(self) -> dict[str, float]:
        """Numbers for the log: groups trained on and dropped so far, and open ones."""
        trained = self.settled[TRAINED]
        dropped = self.settled.total() - trained
        return {
            "groups/trained": float(trained),
            "groups/dropped": float(dropped),
            "groups/open": float(len(self.open)),
        }

    def state(self) -> dict[str, Any]:
        """The ledger's state, as :meth:`load` takes it."""
        return {
            "curriculum": copy.deepcopy(self.curriculum.state()),
            "choices": [vars(each) for each in self._choices],
            "chosen": self._chosen,
            "next": self._next,
            "turn": self.turn,
            "open": {str(number): group.turn for number, group in self.open.items()},
            "settled": dict(self.settled),
        }

    def load(self, state: Mapping[str, Any], *, logged: bool = True) -> dict[int, Task]:
        """Return to a state: the curriculum chooses the tasks under way once more.

        Args:
            logged: Read the groups that were collected before or after, instead of collecting them again.

        Returns:
            The tasks that were chosen, by number, those of replayed groups among them.
        """
        chosen: dict[int, Task] = {}
        self._choices = [_Choice(**each) for each in state["choices"]]
        self._chosen, self._next, self.settled = state["chosen"], state["next"], Counter(state["settled"])
        self.open, self.turn = {}, state["turn"]
        turns = {int(number): turn for number, turn in state["open"].items()}
        for choice in self._choices:
            self.curriculum.load(choice.state)
            chosen |= enumerate(self.curriculum.select(choice.place, choice.count), choice.first)
        self._tasks = {number: task for number, task in chosen.items() if number >= self._next or number in turns}
        self.curriculum.load(state["curriculum"])
        if logged:
            self.read_log()
        for number, turn in turns.items():
            self._open(number)
            if self.open[number].collected is None:
                self.open[number].turn = turn
        return chosen

    def read_log(self) -> None:
        """Take the groups of an earlier process, as they are given out again."""
        lines = [*self._log.lines()]
        self._logged = {number: (order, content) for order, (number, content) in enumerate(lines)}
        self._log.places = itertools.count(len(lines))

    async def prune_log(self, kept: Iterable[int] = ()) -> None:
        """Remove from the log what neither the newest state needs nor is among the groups to be kept."""
        here = (group for group in self.open.values() if group.collected is not None or group in self._entering)
        wanted = {group.number for group in here} | {*self._logged, *kept}
        await self._log.keep(wanted.__contains__)
