"""Tools, budgets and adapters: what a policy gets to see, and what it cannot break."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from gradwire.rl.environments import (
    GymnasiumEnvironment,
    SVRLEnvironment,
    Tool,
    Toolbox,
    ToolEnvironment,
    VerifiersEnvironment,
    parse_tool_calls,
    verifiers_tasks,
)
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import State, Task, ToolCall, Trajectory


def add(a: int, b: int = 0) -> int:
    """Adds two numbers."""
    return a + b


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}"


async def episode(
    rule_inference: Callable[..., Any], environment: Any, answers: list[str], prompt: Any = "2+3?"
) -> Trajectory:
    left = iter(answers)
    manager = RolloutManager(rule_inference(lambda text, number: next(left)), environment)
    (trajectory,) = (await manager.collect([prompt])).trajectories
    return trajectory


async def test_tools_are_called_and_their_results_seen(rule_inference: Callable[..., Any]) -> None:
    trajectory = await episode(rule_inference, ToolEnvironment([add]), ["let me see " + call("add", a=2, b=3), "5"])
    assert trajectory.messages[0]["content"].endswith("- add(a, b): Adds two numbers.")
    assert trajectory.steps[0].tool_results[0].content == "5"
    assert trajectory.steps[1].observation == "5"
    assert trajectory.state is not None and trajectory.state.data["answer"] == "5"
    assert trajectory.state.data["tool_calls"] == 1


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("<tool_call>{oops", "error: a tool call is not JSON"),
        ('<tool_call>["add"]', 'error: a tool call is a JSON object with "name" and "arguments"'),
        ('<tool_call>{"name": "add", "arguments": 3}', "error: the arguments of add are not a JSON object"),
        (call("sub", a=1), "error: there is no tool 'sub'; there are: add"),
        (call("add", c=1), "error: add: missing a required argument: 'a'"),
        (call("add", a="x", b=1), "error: add: TypeError"),
    ],
)
async def test_a_bad_call_is_told_to_the_policy(rule_inference: Callable[..., Any], said: str, seen: str) -> None:
    trajectory = await episode(rule_inference, ToolEnvironment([add]), [said, "5"])
    assert trajectory.status == "completed"
    assert trajectory.steps[1].observation.startswith(seen)


async def test_a_tool_that_hangs_is_given_up() -> None:
    async def forever() -> None:
        await asyncio.sleep(60)

    held = threading.Event()
    box = Toolbox([Tool("a", "", forever, timeout_s=0.05), Tool("b", "", lambda: held.wait(60), timeout_s=0.05)])
    for name in "ab":
        assert "took more than 0.05 s" in (await box.call(ToolCall(name, {}))).error
    held.set()


def test_schema_of_a_function() -> None:
    function = Tool.of(add).schema()["function"]
    assert function["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    }


def test_several_calls_in_one_text() -> None:
    calls, wrong = parse_tool_calls("x" + call("add", a=1) + "</tool_call> y " + call("add", a=2) + "</tool_call>")
    assert [c.arguments["a"] for c in calls] == [1, 2]
    assert wrong == ""


async def test_verification_costs_and_only_an_answer_commits(rule_inference: Callable[..., Any]) -> None:
    environment = SVRLEnvironment([Tool.of(add)], budget=1)
    said = ["5", call("add", a=2, b=3), call("add", a=0), "<answer> 5 </answer>"]
    trajectory = await episode(rule_inference, environment, said)
    seen = [step.observation for step in trajectory.steps[1:]]
    assert seen[0].startswith("Verify your answer with a tool")
    assert seen[1] == "5"
    assert "that costs 1 and 0 of the budget is left" in seen[2]
    assert trajectory.state is not None
    assert trajectory.state.data["answer"] == "5"
    assert trajectory.state.data["verification_cost"] == 1


class Corridor:
    """A Gymnasium-shaped world: walk right to the end."""

    def reset(self, seed: int) -> tuple[int, dict[str, Any]]:
        self.at, self.closed = 0, False
        return self.at, {}

    def step(self, move: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += move
        return self.at, float(self.at == 2), self.at == 2, False, {}

    def close(self) -> None:
        self.closed = True


async def test_gymnasium_worlds(rule_inference: Callable[..., Any]) -> None:
    worlds: list[Corridor] = []

    def make(task: Task) -> Corridor:
        worlds.append(Corridor())
        return worlds[-1]

    environment = GymnasiumEnvironment(make, parse=int, describe=lambda at: f"you are at {at}")
    trajectory = await episode(rule_inference, environment, ["1", "right", "1"])
    assert [step.observation for step in trajectory.steps][:2] == ["you are at 0", "you are at 1"]
    assert "invalid literal" in trajectory.steps[2].observation
    assert trajectory.state is not None and trajectory.state.data["env_rewards"] == (0, 0, 1)
    assert trajectory.state.terminated and worlds[0].closed


class GuessEnv:
    """The shape of a ``verifiers`` environment."""

    max_turns = 5
    system_prompt = "Guess."

    def get_dataset(self) -> list[dict[str, Any]]:
        return [{"question": "my number?", "answer": "7", "info": {"hint": "odd"}}]

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"tries": 0}

    async def env_response(self, messages: Any, state: dict[str, Any]) -> Any:
        state["tries"] += 1
        return [{"role": "user", "content": "higher"}]

    async def is_completed(self, state: dict[str, Any]) -> bool:
        return bool(state["completion"][-1]["content"] == state["answer"])


async def test_verifiers_environments(rule_inference: Callable[..., Any]) -> None:
    env = GuessEnv()
    (task,) = verifiers_tasks(env)
    trajectory = await episode(rule_inference, VerifiersEnvironment(env), ["3", "7"], task)
    assert [m["content"] for m in trajectory.messages] == ["Guess.", "my number?", "3", "higher", "7"]
    assert trajectory.state is not None and trajectory.state.data["verifiers"]["tries"] == 1
    with pytest.raises(TypeError, match="has no env_response and no is_completed"):
        VerifiersEnvironment(object())


async def test_the_same_state_serves_many(rule_inference: Callable[..., Any]) -> None:
    """Inheritance composes: a tool environment whose tools keep a state of the episode."""

    class Shop(ToolEnvironment):
        def reset(self, task: Task, seed: int) -> State:
            return super().reset(task, seed).having(data={"cart": ("bread",)})

    trajectories = (
        await RolloutManager(rule_inference(lambda t, n: "done"), Shop(), group_size=3).collect(["buy"])
    ).trajectories
    assert all(
        t.state is not None and t.state.data["cart"] == ("bread",) and t.state.data["tool_calls"] == 0
        for t in trajectories
    )
