"""Rollouts: many unequal episodes, groups, seeds, and everything that may go wrong in one of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradwire.errors import ConnectionLostError
from gradwire.rl.batching import GenerationBatcher
from gradwire.rl.environments import BaseEnvironment, ConversationEnvironment, SimpleTextEnvironment, StepResult
from gradwire.rl.inference import SamplingParams
from gradwire.rl.rollout_statistics import Rollouts
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Action, State, Task


class Countdown(BaseEnvironment):
    """As many turns as the prompt says."""

    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": f"go {task.prompt}"},), data={"seed": seed})

    def step(self, state: State, action: Action) -> StepResult:
        left = int(str(state.task.prompt)) - state.step - 1
        return StepResult(f"left {left}", terminated=left == 0)


def digits(text: str, number: int) -> str:
    return str(number % 1000)


def shape(rollouts: Rollouts) -> list[tuple[int, int, list[str]]]:
    return [(t.group, t.member, [step.action.raw for step in t.steps]) for t in rollouts.trajectories]


async def test_unequal_episodes_come_back_whole_and_in_order(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(digits)
    lengths = [5, 1, 9, 2, 7, 3]
    manager = RolloutManager(inference, Countdown(), num_parallel=3, group_size=2)
    rollouts = await manager.collect([str(n) for n in lengths])
    assert [len(t.steps) for t in rollouts.trajectories] == [n for n in lengths for _ in range(2)]
    assert [(t.group, t.member) for t in rollouts.trajectories] == [(g, m) for g in range(6) for m in range(2)]
    assert {t.state.data["seed"] for t in rollouts.groups()[0]} == {rollouts.trajectories[0].seed}
    statistics = rollouts.statistics
    assert (statistics.completed, statistics.failed) == (12, 0)
    assert statistics.avg_trajectory_length == 4.5
    assert statistics.sampler.requests == 54
    assert statistics.avg_batch > 2.4  # three places, kept busy to the last few


async def test_a_seed_gives_the_same_trajectories_whatever_the_timing(rule_inference: Callable[..., Any]) -> None:
    class Slow(Countdown):
        async def step(self, state: State, action: Action) -> StepResult:
            await asyncio.sleep(float(np.random.default_rng().uniform(0, 0.003)))
            return super().step(state, action)

    async def collect(seed: int) -> Any:
        manager = RolloutManager(rule_inference(digits), Slow(), num_parallel=4, max_batch=3, seed=seed)
        return shape(await manager.collect(["3", "1", "4", "1", "5", "2"]))

    first = await collect(7)
    assert await collect(7) == first
    assert await collect(8) != first


async def test_episodes_that_ask_together_are_sampled_together(rule_inference: Callable[..., Any]) -> None:
    class OneIsSlow(Countdown):
        async def step(self, state: State, action: Action) -> StepResult:
            await asyncio.sleep(0.5 if state.task.task_id == "slow" else 0.0)
            return super().step(state, action)

    inference = rule_inference(digits, second_per_token=0.02)
    manager = RolloutManager(inference, OneIsSlow(), deterministic=False, num_parallel=8)
    await manager.collect([Task("3", task_id="slow"), *["3"] * 7])
    assert inference.batches == [8, 7, 7, 1, 1]


async def test_a_request_after_one_that_was_given_up_is_sent(rule_inference: Callable[..., Any]) -> None:
    batcher = GenerationBatcher(rule_inference(digits), deterministic=False)
    prompt, params = np.array([51]), SamplingParams()
    batcher.enter(0)
    batcher.enter(1)  # which never asks
    given_up = asyncio.create_task(batcher.generate(0, prompt, params))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0.1)
    await asyncio.wait_for(batcher.generate(0, prompt, params), 10)
    await batcher.close()


async def test_prompts_continue_what_was_sampled(rule_inference: Callable[..., Any]) -> None:
    """The second prompt's ids are the first's, the response's (its end token included) and the new text's."""
    rollouts = await RolloutManager(rule_inference(digits), Countdown()).collect(["2"])
    first, second = rollouts.trajectories[0].steps
    sampled = np.concatenate([first.prompt_ids, first.response_ids])
    np.testing.assert_array_equal(second.prompt_ids[: len(sampled)], sampled)
    assert "".join(map(chr, second.prompt_ids[len(sampled) :])) == "\nuser: left 1\nassistant: "


async def test_what_goes_wrong_in_one_episode_costs_that_one(rule_inference: Callable[..., Any]) -> None:
    waiting = threading.Event()

    class Faulty(Countdown):
        blocking = True

        def step(self, state: State, action: Action) -> StepResult:
            match str(state.task.prompt):
                case "13":
                    raise RuntimeError("no such luck")
                case "14":
                    waiting.wait(60)
            return super().step(state, action)

    manager = RolloutManager(rule_inference(digits), Faulty(), timeout_s=6, straggler_s=0.1, max_steps_per_rollout=6)
    rollouts = await manager.collect(["2", "13", "14", "9", "3"])
    waiting.set()
    assert [t.status for t in rollouts.trajectories] == ["completed", "failed", "timeout", "truncated", "completed"]
    assert rollouts.errors == {"RuntimeError: no such luck": 1, "gave up after 6 s": 1}
    assert [t.ok for t in rollouts.trajectories] == [True, False, False, True, True]
    assert rollouts.statistics.metrics()["rollouts/timeout"] == 1


@pytest.mark.parametrize(("straggler_s", "calls"), [(None, 1), (0.05, 2)])
async def test_the_slowest_is_waited_for_as_long_as_is_said(
    straggler_s: float | None, calls: int, rule_inference: Callable[..., Any]
) -> None:
    class SlowStart(Countdown):
        async def reset(self, task: Task, seed: int) -> State:
            await asyncio.sleep(0.5 * task.data["slow"])
            return super().reset(task, seed)

    manager = RolloutManager(rule_inference(digits), SlowStart(), straggler_s=straggler_s)
    rollouts = await manager.collect([Task("1", data={"slow": slow}) for slow in (False, True, False)])
    assert rollouts.statistics.completed == 3
    assert rollouts.statistics.sampler.calls == calls


METHODS = (
    "reset", "step", "is_terminal", "build_prompt", "parse_action", "observation", "state_key", "update_state",
)  # fmt: skip


@pytest.mark.parametrize("blocking", [False, True], ids=["at once", "in a thread"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [ValueError("bad luck"), SystemExit(3)], ids=["raises", "exits"])
async def test_an_environment_may_fail_anywhere(
    method: str, blocking: bool, error: BaseException, rule_inference: Callable[..., Any]
) -> None:
    def failing(state: Any, *args: Any) -> Any:
        task = state if isinstance(state, Task) else state.task
        if task.prompt == "2":
            raise error
        return getattr(Countdown, method)(environment, state, *args)

    environment = Countdown()
    environment.blocking = blocking
    setattr(environment, method, failing)
    rollouts = await RolloutManager(rule_inference(digits), environment).collect(["1", "2", "3"])
    assert [t.status for t in rollouts.trajectories] == ["completed", "failed", "completed"]
    assert type(error).__name__ in rollouts.trajectories[1].error


async def test_a_sampler_that_goes_away_is_waited_for(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(digits)
    inference.fail = [ConnectionLostError("gone"), ConnectionError("still gone")]
    rollouts = await RolloutManager(inference, Countdown()).collect(["1", "2"])
    assert [t.status for t in rollouts.trajectories] == ["completed"] * 2
    assert rollouts.statistics.sampler.retries == 2


async def test_a_sampler_that_stays_away_fails_its_episodes(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(digits)
    inference.fail = [ConnectionLostError("gone")] * 99
    rollouts = await RolloutManager(inference, Countdown(), patience_s=0.15).collect(["1", "2"])
    assert [t.status for t in rollouts.trajectories] == ["failed"] * 2
    assert "ConnectionLostError: gone" in rollouts.errors


async def test_enough_trajectories_end_the_collection(rule_inference: Callable[..., Any]) -> None:
    manager = RolloutManager(
        rule_inference(digits), Countdown(), group_size=2, min_trajectories=4, num_parallel=6, max_steps_per_rollout=500
    )
    rollouts = await manager.collect(["1", "400", "2", "3"])
    assert [t.group for t in rollouts.trajectories] == [0, 0, 2, 2]
    assert rollouts.statistics.dropped == 4


async def test_places_are_kept_full(rule_inference: Callable[..., Any]) -> None:
    lengths = ["40" if n % 8 == 0 else "2" for n in range(64)]

    async def batches(maintain: bool) -> list[int]:
        inference = rule_inference(digits)
        await RolloutManager(
            inference, Countdown(), num_parallel=8, maintain_parallel_count=maintain, max_steps_per_rollout=50
        ).collect(lengths)
        return list(inference.batches)

    kept, waves = await batches(True), await batches(False)
    assert sum(kept) == sum(waves)
    assert len(waves) == 8 * 40
    assert len(waves) > 3 * len(kept)


def test_unequal_episodes_keep_256_places_busy(rule_inference: Callable[..., Any]) -> None:
    """Most episodes take few turns, some many: at least 3 times the tokens a call of lock-step batches."""
    rng = np.random.default_rng(0)
    lengths = [str(n) for n in np.where(rng.random(1280) < 0.015, 30, rng.integers(1, 3, 1280))]

    async def tokens_a_call(maintain: bool) -> float:
        manager = RolloutManager(
            rule_inference(digits), Countdown(), num_parallel=256, maintain_parallel_count=maintain,
            max_steps_per_rollout=99,
        )  # fmt: skip
        sampler = (await manager.collect(lengths)).statistics.sampler
        return sampler.tokens / sampler.calls

    assert asyncio.run(tokens_a_call(True)) > 3 * asyncio.run(tokens_a_call(False))


async def test_plain_text_and_conversation(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(lambda text, number: "Paris")
    manager = RolloutManager(inference, SimpleTextEnvironment("Q: {prompt}\nA:"), params=SamplingParams(max_tokens=3))
    (trajectory,) = (await manager.collect([{"question": "Capital of France?", "answer": "Paris"}])).trajectories
    assert inference.prompts == ["Q: Capital of France?\nA:"]
    assert (trajectory.response, trajectory.ground_truth) == ("Paris", "Paris")

    async def respond(state: State, action: Action) -> str | None:
        return "are you sure?" if state.step < 1 else None

    conversation = ConversationEnvironment(respond, system="Be brief.")
    (trajectory,) = (await RolloutManager(inference, conversation).collect(["Where?"])).trajectories
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "user", "assistant"]


async def test_one_who_answers_slowly_holds_up_nobody_else(rule_inference: Callable[..., Any]) -> None:
    answered = threading.Event()

    def respond(state: State, action: Action) -> None:
        """The first waits for the second, which is never asked if the first holds up the loop."""
        if state.task.prompt == "second":
            answered.set()
        assert answered.wait(60)

    manager = RolloutManager(rule_inference(digits), ConversationEnvironment(respond))
    rollouts = await manager.collect(["first", "second"])
    assert [t.status for t in rollouts.trajectories] == ["completed"] * 2


async def test_arguments_that_cannot_be(rule_inference: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="num_parallel must be at least 1, got 0"):
        RolloutManager(rule_inference(digits), Countdown(), num_parallel=0)
    with pytest.raises(ValueError, match='a task needs "prompt"'):
        await RolloutManager(rule_inference(digits), Countdown()).collect([{"text": "x"}])
