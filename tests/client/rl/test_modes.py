"""Every setting means the same in every mode, and whatever environments, tools and samplers do, no training hangs."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gradwire.rl import (
    BaseEnvironment,
    GroupBuilder,
    GRPOAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    RolloutsFailedError,
    ToolEnvironment,
    reward_function,
)
from gradwire.rl.environments import StepResult
from gradwire.rl.types import Action, EvaluateResult, State, Task, Trajectory
from support.checking_run import CheckingRun, Doors, arrived, config, walk

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

MODES = ["sync", "ahead", "async"]


def algorithm_of(mode: str, given: Sequence[Any], inference: Any, kind: Any = GRPOAlgorithm, **options: Any) -> Any:
    head = options.pop("head", None)
    settings = {"batch_size": 4, "group_size": 2, "max_staleness": int(mode == "ahead"), **options.pop("settings", {})}
    reward, environment = options.pop("reward", arrived), options.pop("environment", None) or Doors()
    return kind(None, CheckingRun(head), given, reward, config(**settings), environment=environment,
                inference=inference, **options)  # fmt: skip


async def trained(algorithm: Any, mode: str, iterations: int = 3) -> list[dict[str, float]]:
    async with asyncio.timeout(20):
        history: list[dict[str, float]] = await algorithm.train(
            iterations, progress_bar=False, mode="async" if mode == "async" else "sync"
        )
    return history


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("settings", "passes", "steps"),
    [
        ({}, 3, 3),
        ({"num_minibatches": 4}, 12, 12),
        ({"num_minibatches": 4, "gradient_accumulation_steps": 4}, 12, 3),
        ({"num_minibatches": 4, "gradient_accumulation_steps": 3}, 12, 6),
        ({"gradient_accumulation_steps": 8}, 3, 3),
        ({"ppo_epochs": 2}, 6, 6),
        ({"ppo_epochs": 3, "num_minibatches": 2}, 18, 18),
        ({"ppo_epochs": 2, "num_minibatches": 2, "gradient_accumulation_steps": 4}, 12, 3),
        ({"num_minibatches": 9}, 12, 12),
        ({"reference_model": "base"}, 3, 3),
        ({"dynamic_sampling": True, "num_minibatches": 2}, 6, 6),
        ({"on_stale": "drop"}, 3, 3),
        ({"num_parallel": 1}, 3, 3),
    ],
    ids=lambda value: "-".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else "",
)
async def test_settings_mean_the_same(
    mode: str, settings: dict[str, Any], passes: int, steps: int, rule_inference: Callable[..., Any]
) -> None:
    algorithm = algorithm_of(mode, [str(n) for n in range(12)], rule_inference(walk), settings=settings)
    plain = algorithm.run.forward_backward
    algorithm.run.forward_backward = lambda batch, loss, kwargs: plain(
        batch, loss, {name: value for name, value in kwargs.items() if name not in ("reference_model", "beta")}
    )
    history = await trained(algorithm, mode)
    assert len(algorithm.run.batches) == passes and algorithm.run.steps == algorithm.version == steps
    rows = Counter(int(metrics["train/trajectories"]) for metrics in history)
    assert rows == {8: 3}
    assert mode != "async" or max(metrics["train/staleness_max"] for metrics in history) <= 1
    assert history[-1]["groups/trained"] == 12 and history[-1]["groups/open"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_values_replay_and_groups_of_one(mode: str, rule_inference: Callable[..., Any]) -> None:
    ppo = algorithm_of(mode, ["a"], rule_inference(walk), PPOAlgorithm, head="value", settings={"num_minibatches": 2})
    await trained(ppo, mode)
    assert ppo.run.steps == 6
    settings = {"group_size": 1, "replay_fraction": 0.5, "num_minibatches": 2}
    reinforce = algorithm_of(mode, ["a"], rule_inference(walk), REINFORCEAlgorithm, baseline="batch", settings=settings)
    history = await trained(reinforce, mode)
    assert [metrics["train/trajectories"] for metrics in history] == [4, 4, 4]
    assert [metrics["train/replayed"] for metrics in history[1:]] == [2, 2]
    with pytest.raises(ValueError, match="set group_size to at least 2"):
        algorithm_of(mode, ["a"], rule_inference(walk), settings={"group_size": 1})


@pytest.mark.parametrize("mode", MODES)
async def test_equal_rewards_and_evaluations(mode: str, rule_inference: Callable[..., Any]) -> None:
    @reward_function(sandboxed=False)
    def same(response: str) -> float:
        return 1.0

    settings = {"eval_every": 1, "num_minibatches": 2}
    algorithm = algorithm_of(mode, ["a", "b"], rule_inference(walk), settings=settings, reward=same, eval_tasks=["z"])
    history = await trained(algorithm, mode)
    assert [metrics["eval/score"] for metrics in history] == [1, 1, 1]
    assert algorithm.run.steps == 6 and [metrics["train/idle_groups"] for metrics in history] == [1, 1, 1]
    await algorithm.evaluate()
    await trained(algorithm, mode, 1)


async def _cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def _dies() -> None:
    done = await asyncio.to_thread(subprocess.run, ["sh", "-c", "kill -9 $$"])
    raise ConnectionError(f"the process died: {done.returncode}")


class Trouble(Doors):
    """Tasks named after what goes wrong with them; the others go well."""

    blocking = True

    async def step(self, state: State, action: Action) -> StepResult:
        match state.task.key:
            case "raises":
                raise KeyError("no such door")
            case "cancelled":
                await _cancelled()
            case "cancels":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(0)
            case "hangs":
                await asyncio.sleep(1000)
            case "exits":
                raise SystemExit(1)
            case "dies":
                await _dies()
        return super().step(state, action)


class Quick(GRPOAlgorithm):
    straggler_s = 0.1  # others do not wait for what hangs


TROUBLES = {
    "raises": "KeyError", "cancelled": "CancelledError", "hangs": "gave up after", "exits": "SystemExit",
    "dies": "the process died: -9",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_task_that_always_fails(
    mode: str, trouble: str, rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It costs its own group and is named; alone it ends the training with its name."""
    settings = {"num_minibatches": 4, "rollout_timeout_s": 2 if trouble == "hangs" else 10}
    given = [trouble, *"abcdefg"]
    algorithm = algorithm_of(mode, given, rule_inference(walk), Quick, settings=settings, environment=Trouble())
    history = await trained(algorithm, mode, 2)
    assert sum(metrics["train/trajectories"] for metrics in history) == 14
    assert history[-1]["groups/trained"] == 7 and history[-1]["groups/dropped"] == 1
    assert f"the task '{trouble}' is dropped" in caplog.text and TROUBLES[trouble] in caplog.text
    alone = algorithm_of(mode, [trouble], rule_inference(walk), settings=settings, environment=Trouble())
    for _ in range(1 if trouble == "hangs" else 2):  # what failed is collected again, and fails again
        with pytest.raises(RolloutsFailedError, match=f"of the task '{trouble}': .*{TROUBLES[trouble]}"):
            await trained(alone, mode)


@pytest.mark.parametrize("mode", MODES)
async def test_what_cancels_the_collection_itself_ends_the_training(
    mode: str, rule_inference: Callable[..., Any]
) -> None:
    algorithm = algorithm_of(mode, ["cancels"], rule_inference(walk), environment=Trouble())
    with pytest.raises(Exception, match="of the task 'cancels', was cancelled"):
        await trained(algorithm, mode)

    class Lost:
        async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
            await _cancelled()
            return []

    algorithm = algorithm_of(mode, ["a"], rule_inference(walk), reward=Lost())
    with pytest.raises(Exception, match="the reward awaited something that was cancelled") as raised:
        await trained(algorithm, mode)
    assert "of the task 'a'" in raised.value.__notes__[0]

    class Builder(GroupBuilder):
        async def environments(self, task: Task, size: int, seed: int) -> Sequence[BaseEnvironment]:
            await _cancelled()
            return []

    algorithm = algorithm_of(mode, ["a"], rule_inference(walk), environment=Builder())
    with pytest.raises(RolloutsFailedError, match="CancelledError"):
        await trained(algorithm, mode)


@pytest.mark.parametrize("mode", MODES)
async def test_a_sampler_that_cancels_or_miscounts(mode: str, rule_inference: Callable[..., Any]) -> None:
    for generate, words in (
        (lambda prompts, params: _cancelled(), "the sampler's request was cancelled"),
        (lambda prompts, params: _value([]), "zip"),
    ):
        inference = rule_inference(walk)
        inference.generate = generate
        with pytest.raises(RolloutsFailedError, match=words):
            await trained(algorithm_of(mode, ["a"], inference), mode)


async def _value(value: Any) -> Any:
    return value


@pytest.mark.parametrize("mode", MODES)
async def test_a_tool_that_hangs_in_its_thread(mode: str, rule_inference: Callable[..., Any]) -> None:
    def wait(seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "done"

    call = '<tool_call>{"name": "wait", "arguments": {"seconds": 3}}</tool_call>'
    inference = rule_inference(lambda text, number: call if "slow" in text and number % 2 else "left")
    environment = ToolEnvironment([wait], max_turns=3)
    environment.build_prompt = lambda state: "".join(each["content"] for each in state.messages)  # type: ignore[method-assign]
    settings = {"rollout_timeout_s": 0.3, "max_tokens": 200, "on_failure": "warn", "group_size": 4}
    algorithm = algorithm_of(mode, ["slow", *"abc"], inference, settings=settings, environment=environment)
    history = await trained(algorithm, mode, 2)
    assert sum(metrics["rollouts/timeout"] for metrics in history) > 0
    assert history[-1]["groups/open"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_training_says_what_it_waits_for(
    mode: str, rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.rl.algorithms.sources.PATIENCE_S", 0.05)
    algorithm = algorithm_of(mode, ["hangs"], rule_inference(walk), environment=Trouble())
    work = asyncio.ensure_future(trained(algorithm, mode))
    for _ in range(1000):
        await asyncio.sleep(0.02)
        if "the training waits" in caplog.text:
            break
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert "the training waits for group 0, of the task 'hangs'" in caplog.text
    assert len(algorithm.ledger.open) >= 4
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


class Long(Doors):
    max_steps = 200

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult("on", terminated=state.step >= int(state.task.data["turns"]) - 1)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("groups", "turns"), [(250, 2), (2, 200)], ids=["1,000 episodes", "200 turns"])
async def test_many_episodes_and_long_ones(
    mode: str, groups: int, turns: int, rule_inference: Callable[..., Any]
) -> None:
    given = [Task("room", task_id=str(n), data={"turns": turns}) for n in range(groups)]
    settings = {"batch_size": groups, "group_size": 4, "num_parallel": 1000, "max_steps_per_rollout": 200}
    algorithm = algorithm_of(mode, given, rule_inference(walk), settings=settings, environment=Long())
    history = await trained(algorithm, mode, 1)
    assert history[0]["train/trajectories"] == 4 * groups
    assert history[0]["rollouts/max_trajectory_length"] == turns
