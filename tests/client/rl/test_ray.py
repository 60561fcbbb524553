"""Rollouts on a local Ray cluster. Skipped where Ray is not installed (``gradwire[ray]``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from gradwire.rl.environments import BaseEnvironment, StepResult  # noqa: E402
from gradwire.rl.ray_rollouts import RayRolloutManager  # noqa: E402
from gradwire.rl.types import Action, State, Task  # noqa: E402


class Seeded(BaseEnvironment):
    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(
            task, ({"role": "user", "content": "go"},), data={"seed": seed, "pid": os.getpid(), "handle": object()}
        )

    def step(self, state: State, action: Action) -> StepResult:
        marker = state.task.data.get("die_once")
        if state.task.data.get("die") or (marker and not Path(marker).exists()):
            if marker:
                Path(marker).touch()
            os._exit(1)
        return StepResult(terminated=True)


@pytest.fixture(scope="module")
def manager(rule_inference: Any) -> Iterator[RayRolloutManager]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for module in (sys.modules[__name__], sys.modules[rule_inference.__module__]):
        ray.cloudpickle.register_pickle_by_value(module)
    made = RayRolloutManager(
        lambda: rule_inference(lambda text, number: str(number)), Seeded, num_workers=2, group_size=3, seed=5
    )
    yield made
    made.close()
    ray.shutdown()


async def test_groups_stay_together_over_workers(manager: RayRolloutManager) -> None:
    rollouts = await manager.collect([str(n) for n in range(5)], seed=1)
    assert [(t.group, t.member) for t in rollouts.trajectories] == [(g, m) for g in range(5) for m in range(3)]
    states = [[t.state.data for t in group if t.state] for group in rollouts.groups()]
    assert all(len({s["pid"] for s in group}) == 1 and len({s["seed"] for s in group}) == 1 for group in states)
    assert len({group[0]["pid"] for group in states}) == 2
    assert all("handle" not in s for group in states for s in group)
    assert rollouts.statistics.sampler.requests == 15
    again = await manager.collect([str(n) for n in range(5)], seed=1)
    assert [t.response for t in again.trajectories] == [t.response for t in rollouts.trajectories]


async def test_a_worker_that_dies_is_replaced(manager: RayRolloutManager, tmp_path: Path) -> None:
    tasks = [Task("a", data={"die_once": str(tmp_path / "died")}), Task("b")]
    rollouts = await manager.collect(tasks)
    assert [t.status for t in rollouts.trajectories] == ["completed"] * 6
    always = await manager.collect([Task("a", data={"die": True}), Task("b")])
    assert [t.status for t in always.trajectories] == ["failed"] * 3 + ["completed"] * 3
    assert all("the worker died" in error for error in always.errors)
