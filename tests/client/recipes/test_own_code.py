"""Rewards and environments of one's own: loaded from files, checked, and run in the sandbox."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.data import prompts
from gradwire.recipes import command
from gradwire.recipes.own_code import agent_of, environment_of, reward_of, task_of
from gradwire.recipes.settings import SettingsError
from gradwire.rl import last_number
from gradwire.rl.rewards import RewardComputer, WeightedReward
from gradwire.rl.types import Action, EvaluateResult, StepData, StepOutput, Task, Trajectory
from support.own_code import own_code


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_code(tmp_path_factory.mktemp("code"))


def answered(*texts: str, truth: Any = "1") -> Trajectory:
    none = np.zeros(1, np.int64)
    steps = [StepData(at, "", "", none, Action(text), none, none.astype(np.float32)) for at, text in enumerate(texts)]
    return Trajectory(Task("?", truth, data={"wanted": truth}), steps=steps)


def scores(reward: Any, *trajectories: Trajectory) -> list[EvaluateResult]:
    async def evaluated() -> list[EvaluateResult]:
        found: list[EvaluateResult] = await reward.evaluate(trajectories)
        await asyncio.to_thread(getattr(reward, "close", lambda: None))
        return found

    return asyncio.run(evaluated())


def test_a_function_of_a_file_is_a_reward_in_the_sandbox(code: Path) -> None:
    (result,) = scores(reward_of(f"{code}/own_rewards.py:ones"), answered("11ab"))
    assert result.score == 0.5 and not result.error
    (result,) = scores(reward_of(f"{code}/own_rewards.py:pid"), answered("x"))
    assert result.score not in (0.0, os.getpid())


def test_a_file_may_have_the_name_of_another_module(code: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(
        "def score(response):\n    return half(response) * 2\n\ndef half(x):\n    return 2.0\n"
    )
    (result,) = scores(reward_of(f"{tmp_path}/json.py:score"), answered("x"))
    assert result.score == 4.0


def test_several_rewards_are_weighted(code: Path) -> None:
    names = {f"{code}/own_rewards.py:ones": 1.0, f"{code}/own_rewards.py:brevity": -0.5, "last_number": 2}
    (result,) = scores(reward_of(names), answered("11a 1"))
    assert result.metrics == pytest.approx({"ones": 0.6, "brevity": 0.5, "last_number": 1.0})
    assert result.score == pytest.approx(0.6 - 0.25 + 2)


def test_weighted_rewards_of_steps_add_up() -> None:
    class OfSteps:
        async def evaluate(self, trajectories: Any) -> list[EvaluateResult]:
            return [EvaluateResult(step_outputs=(StepOutput(0, 3.0), StepOutput(-1, 1.0))) for _ in trajectories]

    class Fails:
        async def evaluate(self, trajectories: Any) -> list[EvaluateResult]:
            return [EvaluateResult(0.0, error="no")] * len(trajectories)

    def whole(response: str) -> float:
        return 5.0

    episode, alone = answered("a", "b"), answered("c")
    reward = WeightedReward({"steps": OfSteps(), "whole": whole}, {"steps": 2.0})
    asyncio.run(RewardComputer(reward).compute([episode]))
    reward.close()
    assert episode.reward == 13.0 and [step.reward for step in episode.steps] == [6.0, 7.0]
    (result,) = scores(WeightedReward({"steps": OfSteps(), "fails": Fails()}), alone)
    assert result.error == "no"
    with pytest.raises(ValueError, match="'other', which is none of steps"):
        WeightedReward({"steps": OfSteps()}, {"other": 1.0})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.py:ones", "there is no file"),
        ("own_rewards.py:one", "has no 'one'; it has ones, brevity"),
        ("own_rewards.py:number", "the reward is int; it must be a function"),
        ("own_rewards.py:wrong", "has a parameter 'answer_text' that is unknown"),
    ],
)
def test_mistakes_in_rewards_are_named(name: str, words: str, code: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        reward_of(f"{code}/{name}")


def test_mistakes_in_environments_are_named(code: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_file.py").write_text("x = 1\nx = y\n")
    for name, arguments, words in (
        (f"{tmp_path}/broken_file.py:x", {}, "broken_file.py cannot be imported: NameError.*line 2"),
        (f"{code}/own_world.py:Counting", {"turn": 2}, "TypeError.*unexpected keyword argument 'turn'"),
        (f"{code}/own_world.py:broken", {}, "RuntimeError: no world .*own_world.py, line"),
        (f"{code}/own_world.py:StepResult", {}, "makes StepResult; it must be a BaseEnvironment"),
        ("world", {}, "there is no entry point 'world'; no package offers any: write FILE.py:NAME"),
        ("nowhere.at_all:x", {}, "there is no module 'nowhere', which nowhere.at_all:x needs"),
    ):
        with pytest.raises(SettingsError, match=words):
            environment_of(name, arguments)


def test_an_environment_of_a_package_is_found_by_its_entry_point(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(code))
    offered = importlib.metadata.EntryPoint("counting", "own_world:Counting", "gradwire.environments")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [offered] if "environments" in group else [])
    made = environment_of("counting", {"turns": 3})
    assert type(made).__name__ == "Counting"
    with pytest.raises(SettingsError, match=r"there is no entry point 'count'; there are counting, or write FILE\.py"):
        environment_of("count", {})


def test_an_agent_is_a_command_with_options() -> None:
    made = agent_of("claude -p 'do {prompt}'", {"retries": 1, "limits": {"max_turns": 3}}, last_number())
    assert made._command == ("claude", "-p", "do {prompt}")
    assert made._options["limits"].max_turns == 3 and made._scorer is not None
    for arguments, words in (
        ({"retrys": 1}, r"no argument 'retrys' .did you mean 'retries'"),
        ({"limits": {"turns": 3}}, "unexpected keyword argument 'turns'"),
        ({"retries": -1}, "retries at least 0"),
    ):
        with pytest.raises(SettingsError, match=f"environment_args of the agent: .*{words}"):
            agent_of(["claude"], arguments, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward": "ones"}, "reward has 'ones'; it must be one of last_number, math_answer"),
        ({"reward": {"last_number": "much"}}, "reward has the weight 'much' for last_number; it must be a number"),
        ({"reward": 3}, "reward is 3; it must be a text or a mapping"),
        ({"environment_args": {"turns": 2}}, "environment_args is set, and environment is empty"),
        ({"environment": "agent"}, "environment: agent needs a command, and a command needs environment: agent"),
        ({"command": "claude -p"}, "environment: agent needs a command, and a command needs environment: agent"),
        ({"order_by": "level"}, "there is no setting 'order_by'"),
        ({"group_size": 1}, "group_size is 1; an answer is judged by the others"),
    ],
)
def test_settings_are_checked_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        command.settings_of("rloo", given)
    with pytest.raises(SettingsError, match="environment is empty; gigpo compares"):
        command.settings_of("gigpo", {})


def test_a_task_has_the_id_of_its_row() -> None:
    rows = [{"question": "1 + 1?", "answer": "2", "task_id": 7}, {"question": "1 + 2?", "answer": "3"}]
    tasks = [task_of(row, "last_number") for row in prompts(rows)]
    assert [(task.task_id, task.ground_truth) for task in tasks] == [("7", "2"), ("", "3")]
