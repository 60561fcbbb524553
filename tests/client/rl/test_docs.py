"""The code of the guide for reward authors runs, and its functions do what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.types import Action, StepData, Task, ToolCall, ToolResult, Trajectory

GUIDE = Path(__file__).parents[3] / "docs" / "reward_functions.md"


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(block, str(GUIDE), "exec"), scope)
    return scope


def trajectory(*said: str, truth: Any, member: int = 0, results: tuple[ToolResult, ...] = ()) -> Trajectory:
    steps = [
        StepData(
            i,
            "",
            i,
            np.array([1]),
            Action(text),
            np.array([2]),
            np.zeros(1, np.float32),
            tool_results=results[i : i + 1],
        )
        for i, text in enumerate(said)
    ]
    return Trajectory(Task("which?", truth), 0, member, steps=steps)


async def scored(function: Any, *trajectories: Trajectory) -> list[float]:
    await RewardComputer(function).compute(trajectories)
    errors = [each.evaluation.error for each in trajectories if each.evaluation]
    assert errors == [""] * len(trajectories)
    function.close()
    return [each.reward for each in trajectories]


async def test_pointwise(guide: dict[str, Any]) -> None:
    assert await scored(guide["correct"], trajectory("it is 7", truth="7"), trajectory("8", truth="7")) == [1, 0]
    assert await scored(guide["patient"], trajectory("four", truth=None)) == [4]


async def test_steps(guide: dict[str, Any]) -> None:
    tool = ToolCall("add", {})
    results = (ToolResult(tool, "", "no such tool"), ToolResult(tool, "5"))
    each = trajectory("call", "call", "5", truth=5, results=results)
    assert await scored(guide["solved_with_few_calls"], each) == [1]
    assert [step.reward for step in each.steps] == [-0.2, 0.1, 0]
    assert each.evaluation is not None and each.evaluation.step_outputs[0].reason == "no such tool"


async def test_batchwise(guide: dict[str, Any]) -> None:
    three = [trajectory(text, truth=7, member=m) for m, text in enumerate(["it is 7", "7", "8"])]
    assert await scored(guide["shortest_right_answer_wins"], *three) == [pytest.approx(1 / 7), 1, 0]


async def test_a_judge(guide: dict[str, Any], rule_inference: Callable[..., Any]) -> None:
    asked: list[str] = []

    def answer(text: str, number: int) -> str:
        asked.append(text)
        return "2, 0, then 1; not 9"

    three = [trajectory(text, truth=None, member=m) for m, text in enumerate("xyz")]
    rewards = await scored(guide["judged_by"](rule_inference(answer)), *three)
    assert rewards == [pytest.approx(2 / 3), pytest.approx(1 / 3), 1]
    assert asked == ["Question: which?\n[0] x\n[1] y\n[2] z\nBest first, as numbers:"]
