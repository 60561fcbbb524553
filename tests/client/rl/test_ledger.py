"""Each task is trained on once, or named as dropped: in every mode, in any number of calls, and after kills."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gradwire.errors import NonFiniteError
from gradwire.rl import GRPOAlgorithm, Mixture, Part, StagedCurriculum, SuccessCurriculum
from gradwire.rl.environments import BaseEnvironment, StepResult
from gradwire.rl.group_log import GroupLog
from gradwire.rl.types import Action, State, Task
from support.checking_run import CheckingRun, arrived, config, walk

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "ahead": {"mode": "sync", "max_staleness": 1},
    "async": {"mode": "async", "max_staleness": 1},
    "far": {"mode": "async", "max_staleness": 3},
}
UNIT_S = 0.0005


class Waiting(BaseEnvironment):
    """Answers after as long as the task says. A task's episodes may wait for ``gate``, and are counted."""

    blocking = False

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()

    def reset(self, task: Task, seed: int) -> State:
        self.begun[task.key] += 1
        return State(task, ({"role": "user", "content": "room 0"},))

    async def step(self, state: State, action: Action) -> StepResult:
        await asyncio.sleep(UNIT_S * state.task.data.get("takes", 1))
        return StepResult("room 2", terminated=True)


class Killed(BaseException):
    """Ends a training as a kill does: nothing after it is written."""


class Training:
    """A training whose trained tasks are written down."""

    def __init__(self, run: CheckingRun, tasks: Any, inference: Any, mode: str, **settings: Any) -> None:
        options = dict(MODES[mode])
        kind = options.pop("mode")
        self.options: dict[str, Any] = {"mode": kind, "progress_bar": False}
        if kind == "sync":
            settings |= options
        else:
            self.options |= options
        self.environment = Waiting()
        outer = self

        class Watched(GRPOAlgorithm):
            async def training_batch(self, trajectories: Any) -> Any:
                outer.parts.append([each.task.key for each in trajectories[::2]])
                outer.ages += [self.version - step.policy_version for each in trajectories for step in each.steps]
                if len(outer.parts) == outer.killed_at:
                    raise Killed
                return await super().training_batch(trajectories)

        self.parts: list[list[str]] = []
        self.ages: list[int] = []
        self.killed_at = 0
        self.algorithm = Watched(
            None, run, tasks, arrived, config(**{"batch_size": 4, "group_size": 2} | settings),
            environment=self.environment, inference=inference,
        )  # fmt: skip

    async def train(self, iterations: int) -> None:
        async with asyncio.timeout(30):
            await self.algorithm.train(iterations, **self.options)

    @property
    def trained(self) -> list[str]:
        return [key for part in self.parts for key in part]


def tasks(durations: Sequence[float]) -> list[Task]:
    return [Task("room", task_id=str(n), data={"takes": takes}) for n, takes in enumerate(durations)]


@pytest.mark.parametrize("calls", [(24,), (4,) * 6, (1,) * 24], ids=["one call", "six calls", "24 calls"])
@pytest.mark.parametrize("mode", MODES)
async def test_long_tasks_are_trained_on_as_often_as_short_ones(
    mode: str, calls: Sequence[int], rule_inference: Callable[..., Any]
) -> None:
    """Every fourth task takes 150 times as long: each of the 96 is trained on once an epoch."""
    given = tasks([60 if n % 4 == 0 else 0.4 for n in range(96)])
    training = Training(CheckingRun(), given, rule_inference(walk), mode)
    for iterations in calls:
        await training.train(iterations)
    assert Counter(training.trained) == Counter(task.key for task in given)
    assert max(training.ages) <= MODES[mode].get("max_staleness", 0)
    assert training.algorithm.history[-1]["groups/trained"] == 96
    assert training.algorithm.history[-1]["groups/open"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_after_kills_nothing_is_lost_nor_repeated_nor_collected_anew(
    mode: str, tmp_path: Path, rule_inference: Callable[..., Any]
) -> None:
    """Tasks of 1 to 200 units, minibatches, and three kills between checkpoints."""
    given = tasks([1 + 199 * (n % 12 == 5) + n % 3 for n in range(48)])
    run, inference = CheckingRun(), rule_inference(walk)
    kept: list[str] = []
    begun: Counter[str] = Counter()
    for kill in (4, 7, 3, 0):
        training = Training(
            run, given, inference, mode, num_minibatches=2, checkpoint_dir=tmp_path, save_every=2, learning_rate=1e-3
        )
        training.killed_at = kill
        done = await training.algorithm.resume()
        try:
            await training.train(12 - done)
        except Killed:
            # A part is an iteration, or in async a minibatch of it: of two parts, the checkpoint has every second.
            per_save = 2 if mode in ("sync", "ahead") else 4
            kept += [key for part in training.parts[: (kill - 1) // per_save * per_save] for key in part]
        else:
            kept += training.trained
        begun += training.environment.begun
    assert Counter(kept) == Counter(task.key for task in given)
    # Only what was under way when it was killed is collected again: at most what may be open at once.
    assert sum(begun.values()) - 96 <= 3 * 2 * (4 if mode == "sync" else 8)


@pytest.mark.parametrize("disk", ["fast", "slow"])
async def test_a_killed_training_repeats_what_it_learned(
    disk: str, tmp_path: Path, rule_inference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups since the checkpoint are trained on again, in the same minibatches and without one new episode."""
    if disk == "slow":
        add, chance = GroupLog._add, random.Random(0)

        def slowly(log: GroupLog, groups: Any) -> list[int]:
            places = add(log, groups)
            time.sleep(0.01 * chance.random())
            return places

        monkeypatch.setattr(GroupLog, "_add", slowly)
    given = tasks([1 + n % 7 for n in range(40)])
    run, inference = CheckingRun(), rule_inference(walk)
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "save_every": 3}
    first = Training(run, given, inference, "async", **settings)
    first.killed_at = 6
    with pytest.raises(Killed):
        await first.train(10)
    again = Training(run, given, inference, "async", **settings)
    assert await again.algorithm.resume() == 3
    await again.train(7)
    assert again.parts[:3] == first.parts[3:6]
    assert not set(first.trained) & set(again.environment.begun)
    assert Counter(first.trained[:12] + again.trained) == Counter(task.key for task in given)
    best = Training(run, given, inference, "async", **settings)  # begun anew, it takes nothing of the old
    await best.train(1)
    assert set(best.trained) <= set(best.environment.begun)


async def test_what_an_error_leaves_is_the_first_of_the_next_call(rule_inference: Callable[..., Any]) -> None:
    for mode in MODES:
        run = CheckingRun()
        training = Training(run, tasks([1] * 32), rule_inference(walk), mode)
        await training.train(2)
        run.errors = [NonFiniteError("the loss is NaN")]
        with pytest.raises(NonFiniteError):
            await training.train(2)
        failed = training.parts.pop()
        await training.train(3)
        assert set(training.parts[2]) == set(failed)
        await training.train(3)
        assert Counter(training.trained) == Counter(str(n) for n in range(32))


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_is_cancelled_trains_on_nothing_twice(mode: str, rule_inference: Callable[..., Any]) -> None:
    """The server carries out what was submitted, so its groups are trained on; the next call goes on behind them."""
    run, submitted = CheckingRun(), asyncio.Event()
    training = Training(run, tasks([1 + 30 * (n % 5 == 3) for n in range(40)]), rule_inference(walk), mode)
    submit = run.forward_backward

    def forward_backward(*batch: Any) -> Any:
        submitted.set()
        return submit(*batch)

    run.forward_backward = forward_backward  # type: ignore[method-assign]
    for calls in range(1, 5):
        submitted.clear()
        call = asyncio.ensure_future(training.train(10))
        await submitted.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert training.algorithm.ledger.settled == {"trained": 4 * calls} and run.steps == calls
    await training.train(6)
    assert run.steps == 10 and Counter(training.trained) == Counter(str(n) for n in range(40))


async def test_modes_change_between_calls(rule_inference: Callable[..., Any]) -> None:
    training = Training(CheckingRun(), tasks([1, 9] * 16), rule_inference(walk), "async")
    await training.train(3)
    training.options = {"mode": "sync", "progress_bar": False}
    await training.train(2)
    training.options = {"mode": "async", "max_staleness": 2, "progress_bar": False}
    await training.train(3)
    assert Counter(training.trained) == Counter(str(n) for n in range(32))


@pytest.mark.parametrize("mode", MODES)
async def test_curricula_and_mixtures_survive_a_kill(
    mode: str, tmp_path: Path, rule_inference: Callable[..., Any]
) -> None:
    """What was under way is what the curriculum had chosen; each part of a mixture is walked once an epoch."""

    def mixture() -> Mixture:
        some, others = tasks([1, 20, 1, 1, 5, 1]), [Task("o", task_id=f"o{n}") for n in range(9)]
        return Mixture({"a": Part(some, arrived, Waiting(), 2.0), "b": Part(others, arrived, Waiting(), 1.0)})

    sources: dict[str, Callable[[], Any]] = {
        "mixture": lambda: mixture().curriculum,
        "staged": lambda: StagedCurriculum([tasks([1, 3, 1, 1]), [Task("n", task_id=f"n{n}") for n in range(5)]],
                                           window=16, threshold=0.0),
        "success": lambda: SuccessCurriculum(tasks([1, 4, 1, 1, 2, 1])),
    }  # fmt: skip
    for name, make in sources.items():
        run, inference, folder = CheckingRun(), rule_inference(walk), tmp_path / f"{mode}-{name}"
        settings: dict[str, Any] = {"checkpoint_dir": folder, "save_every": 2, "batch_size": 3}
        killed = Training(run, make(), inference, mode, **settings)
        killed.killed_at = 4
        with pytest.raises(Killed):
            await killed.train(20)
        saved = {group.number: group.task.key for group in killed.algorithm.ledger.open.values()}
        again = Training(run, make(), inference, mode, **settings)
        assert await again.algorithm.resume() == 2
        opened = again.algorithm.ledger.open
        assert all(saved.get(number, group.task.key) == group.task.key for number, group in opened.items())
        await again.train(13)
        trained = killed.trained[:6] + again.trained
        assert len(trained) == 45
        if name == "mixture":
            counts = Counter(key.partition("/")[0] for key in trained)
            for part, size in (("a", 6), ("b", 9)):
                each = Counter(key for key in trained if key.startswith(f"{part}/"))
                assert len(each) == min(size, counts[part]) and max(each.values()) - min(each.values()) <= 1, each
        shutil.rmtree(folder)
