"""The replay buffer and the curricula."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gradwire.rl import ReplayBuffer, StagedCurriculum, SuccessCurriculum
from gradwire.rl.curricula import ShuffledCurriculum
from gradwire.rl.types import Task, Trajectory
from support.checking_run import steps

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


def test_a_buffer_keeps_groups_whole() -> None:
    def group(number: int, version: int) -> list[Trajectory]:
        made = [Trajectory(Task("t"), number, m, steps=steps("s", rewards=(0,))) for m in range(3)]
        for each in made:
            each.steps[0].policy_version = version
        return made

    buffer = ReplayBuffer(7, max_age=2)
    for number in range(4):
        buffer.add(group(number, number))
    assert len(buffer) == 6
    drawn = buffer.sample(5, np.random.default_rng(0), version=5)
    assert [t.group for t in drawn] == [3, 3, 3]
    assert buffer.sample(1, np.random.default_rng(0), version=9) == []


def test_curricula() -> None:
    shuffled = ShuffledCurriculum([str(n) for n in range(6)], seed=1)
    epoch = [task.prompt for i in range(3) for task in shuffled.select(i, 2)]
    assert sorted(map(str, epoch)) == ["0", "1", "2", "3", "4", "5"]
    again = ShuffledCurriculum([str(n) for n in range(6)], seed=1)
    again.load(shuffled.state())
    assert shuffled.select(3, 5) == again.select(0, 5)

    def solved(task: str, *rewards: float) -> list[Trajectory]:
        return [Trajectory(Task(task), steps=steps("s", rewards=(0,)), reward=reward) for reward in rewards]

    staged = StagedCurriculum([["easy"], ["hard"]], threshold=0.7, window=4)
    staged.update(solved("easy", 1, 1, 0))
    assert staged.select(0, 1)[0].prompt == "easy"
    staged.update(solved("easy", 1, 1))
    resumed = StagedCurriculum([["easy"], ["hard"]])
    resumed.load(json.loads(json.dumps(staged.state())))
    assert resumed.select(0, 1)[0].prompt == "hard"

    success = SuccessCurriculum(["always", "sometimes"], floor=0.001, decay=0.0)
    success.update(solved("always", 1, 1) + solved("sometimes", 1, 0))
    chosen = [success.select(i, 1)[0].prompt for i in range(50)]
    assert chosen.count("sometimes") > 45
