"""What steps and tokens of a trajectory get: advantages, bootstraps, weights where the sampler differs."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradwire.rl import GiGPOAlgorithm, GRPOAlgorithm, PPOAlgorithm
from gradwire.rl.algorithms import gigpo_credit
from gradwire.rl.environments import BaseEnvironment, StepResult
from gradwire.rl.rows import rows_of
from gradwire.rl.types import Action, EvaluateResult, State, StepData, Task, Trajectory
from support.checking_run import ALGORITHMS, CheckingRun, Doors, arrived, collected, config, steps, walk

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


def test_gigpo_credit_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """The worked example of test_advantages, from trajectories, with each stage in the log."""
    good = Trajectory(Task("t"), 0, 0, steps=steps("start", "door", rewards=(0, 1)), reward=1)
    bad = Trajectory(Task("t"), 0, 1, steps=steps("start", "door", "wall", rewards=(0, 0, 0)), reward=0)
    with caplog.at_level(logging.DEBUG, "gradwire.rl.gigpo"):
        credit = gigpo_credit([good, bad], gamma=0.5, omega=2.0, scale=False)
    np.testing.assert_allclose(credit.episode, [0.5, -0.5])
    np.testing.assert_allclose(credit.returns, [0.5, 1, 0, 0, 0])
    np.testing.assert_allclose(credit.step, [0.25, 0.5, -0.25, -0.5, 0])
    np.testing.assert_allclose([s.advantage for s in good.steps + bad.steps], [1.0, 1.5, -1.0, -1.5, -0.5])
    assert credit.singletons.value() == 0.2
    for step in good.steps + bad.steps:
        step.state_key = (step.state_key, [1])  # cannot be hashed: compared by how it is written
    again = gigpo_credit([good, bad], gamma=0.5, omega=2.0, scale=False, state_hash=lambda step: {"at": step.state_key})
    np.testing.assert_array_equal(again.advantages, credit.advantages)
    assert "A_E  group 0 member 0: reward 1, A_E 0.5" in caplog.text
    assert "G_k  1: steps [1, 3], returns [1, 0]" in caplog.text
    assert "anchor state 2 of group 0: 'wall'" in caplog.text


async def test_gigpo_sends_a_steps_advantage_with_its_tokens(rule_inference: Callable[..., Any]) -> None:
    algorithm = GiGPOAlgorithm(
        None, CheckingRun(), ["a"], arrived, config(), environment=Doors(), inference=rule_inference(walk), omega=0.7
    )
    trajectories = await collected(algorithm)
    batch = await algorithm.training_batch(trajectories)
    flat = [
        (m, a) for ms, as_ in zip(batch.columns["response_masks"], batch.columns["advantages"]) for m, a in zip(ms, as_)
    ]
    assert len(flat) == len(trajectories)
    for trajectory, (mask, advantages) in zip(trajectories, flat):
        expected = [step.advantage for step in trajectory.steps for _ in step.response_ids]
        np.testing.assert_allclose(advantages[mask], expected, rtol=1e-6)
        np.testing.assert_array_equal(advantages[~mask], 0)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert 0 <= metrics["train/singleton_steps"] < 1  # found here; the loss, which has no steps, knows of none


@pytest.mark.parametrize("name", ["ppo", "grpo", "gigpo"])
async def test_a_sampler_that_differs_from_the_trainer_is_corrected_for(
    name: str, rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    kind, head, _ = ALGORITHMS[name]

    async def trained(logprob: float, **loss_kwargs: Any) -> CheckingRun:
        run = CheckingRun(head)
        run.logprob = logprob
        settings = config(loss_kwargs=loss_kwargs)
        algorithm = kind(None, run, ["a"], arrived, settings, environment=Doors(), inference=rule_inference(walk))
        await algorithm.train(3, progress_bar=False)
        return run

    run = await trained(-0.5)
    assert run.scored == 1 and caplog.text.count("truncated importance weights") == 0  # measured once
    assert all("sampler_correction" not in kwargs for _, kwargs, _ in run.batches)
    run = await trained(-0.502)
    always = name == "ppo"  # the others take the log-probabilities of the loss's own forward
    assert run.scored == (3 if always else 1) and caplog.text.count("truncated importance weights") == 1  # said once
    for _, kwargs, batch in run.batches:
        assert kwargs["sampler_correction"] == "token_truncate"
        assert ("old_log_probs" in batch.fields) == always
        if always:
            np.testing.assert_allclose(batch["old_log_probs"], -0.502)
        np.testing.assert_allclose(batch["sampler_log_probs"], -0.5)
    run = await trained(-0.502, sampler_correction=None)
    assert run.scored == 0 and all(kwargs["sampler_correction"] is None for _, kwargs, _ in run.batches)
    run = await trained(-0.5, sampler_correction="sequence_mask")
    assert run.scored == (3 if always else 0)
    assert {kwargs["sampler_correction"] for _, kwargs, _ in run.batches} == {"sequence_mask"}


def test_steps_that_continue_each_other_make_one_row() -> None:
    first = StepData(0, "", "", np.array([1, 2]), Action("a"), np.array([5, 6]), np.array([-1, -2], np.float32))
    after = StepData(1, "", "", np.array([1, 2, 5, 6, 9]), Action("b"), np.array([7]), np.array([-3], np.float32))
    other = StepData(2, "", "", np.array([4]), Action("c"), np.array([8]), np.array([-4], np.float32))
    one, two = rows_of([Trajectory(Task("t"), steps=[first, after, other])])
    assert one.ids.tolist() == [1, 2, 5, 6, 9, 7]
    assert one.written.tolist() == [False, False, True, True, False, True]
    assert one.logprobs.tolist() == [0, 0, -1, -2, 0, -3]
    assert one.step_of.tolist() == [-1, -1, 0, 0, -1, 1]
    assert one.at_ends([1, 2, 3]).tolist() == [0, 0, 0, 1, 0, 2]
    assert (one.last, two.last, two.prompt_length) == (False, True, 1)
    first.logprobs = first.logprobs[:1]
    with pytest.raises(ValueError, match="step 0 has 2 tokens and 1 log-probabilities"):
        rows_of([Trajectory(Task("t"), steps=[first])])


def split(group: int, member: int, reward: float, *rows: int) -> Trajectory:
    """A trajectory whose steps do not continue each other: each is a row of so many sampled tokens."""
    made = []
    for place, size in enumerate(rows):
        prompt, logprobs = np.array([member, place]), np.full(size, -0.5, np.float32)
        made.append(StepData(place, "", place, prompt, Action("a"), np.arange(size), logprobs))
    return Trajectory(Task("t"), group, member, steps=made, reward=reward)


@pytest.mark.parametrize("reduction", ["sequence_mean", "sequence_mean_token_sum", "token_mean", "sum"])
@pytest.mark.parametrize("scale", [True, False, "batch"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
async def test_a_trajectory_of_many_rows_counts_once(
    reduction: str, scale: Any, baseline: str, rule_inference: Callable[..., Any]
) -> None:
    """The loss at ratio 1 is minus the advantage of each token, averaged over trajectories and not over rows."""
    trajectories = [split(0, 0, 1.0, 2, 3, 1), split(0, 1, 0.0, 4), split(0, 2, 0.5, 1, 1), split(1, 0, 3.0, 2),
                    split(1, 1, 1.0, 1, 5)]  # fmt: skip
    settings = config(loss_kwargs={"reduction": reduction, "scale_rewards": scale, "baseline": baseline})
    algorithm = GRPOAlgorithm(
        None, CheckingRun(), ["a"], arrived, settings, environment=Doors(), inference=rule_inference(walk)
    )
    columns = (await algorithm.training_batch(trajectories)).columns
    sizes = [sum(map(int, mask)) for masks in columns["response_masks"] for mask in masks]
    advantages = [float(each) for of_row in columns["advantages"] for each in of_row]
    assert len(sizes) == 9

    expected_by_trajectory: list[float] = []
    rewards = [each.reward for each in trajectories]
    for each in trajectories:
        group = [other.reward for other in trajectories if other.group == each.group]
        others = [other.reward for other in trajectories if other.group == each.group and other is not each]
        advantage = each.reward - (
            sum(others) / len(others) if baseline == "leave_one_out" else sum(group) / len(group)
        )
        if scale:
            advantage /= statistics.stdev(rewards if scale == "batch" else group) + 1e-4
        expected_by_trajectory.append(advantage)

    def reduced(values: list[float], tokens: list[int]) -> float:
        """Values of sequences, the same at each of their tokens."""
        if reduction == "sequence_mean":
            return sum(values) / len(values)
        total = sum(value * size for value, size in zip(values, tokens))
        return total / {"sequence_mean_token_sum": len(values), "token_mean": sum(tokens), "sum": 1}[reduction]

    expected = reduced(expected_by_trajectory, [each.num_tokens for each in trajectories])
    assert reduced(advantages, sizes) == pytest.approx(expected, abs=1e-6)
    assert [each.steps[0].advantage for each in trajectories] == pytest.approx(expected_by_trajectory)


async def test_arguments_that_need_whole_groups_in_a_batch_are_named(
    rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(loss_kwargs={"whiten_advantages": True, "baseline": "length_weighted"})
    algorithm = GRPOAlgorithm(
        None, CheckingRun(), ["a"], arrived, settings, environment=Doors(), inference=rule_inference(walk)
    )
    for _ in range(2):
        await algorithm.training_batch([split(0, 0, 1.0, 2, 3), split(0, 1, 0.0, 1)])
    assert caplog.text.count("whiten_advantages and baseline of loss_kwargs has no effect") == 1


async def test_ppo_bootstraps_what_was_cut_off_and_rewards_ends(rule_inference: Callable[..., Any]) -> None:
    algorithm = PPOAlgorithm(
        None, CheckingRun("value"), ["a"], arrived, config(), environment=Doors(), inference=rule_inference(walk)
    )
    (trajectory,) = [Trajectory(Task("t"), steps=steps("s", rewards=(1.5,)), status="truncated", reward=1.5)]
    trajectory.evaluation = EvaluateResult(1.5)
    columns = (await algorithm.training_batch([trajectory])).columns
    # ids 1 2 | 7 8: the values are of the states before 7 and 8. The loss trains these, and none after 8.
    assert columns["old_values"][0].tolist() == [0, 0, 2, 3]
    assert columns["bootstrap_values"] == [3]
    assert columns["rewards"][0].tolist() == [0, 0, 0, 1.5]
    assert trajectory.steps[0].value == 2
    trajectory.status = "completed"
    assert (await algorithm.training_batch([trajectory])).columns["bootstrap_values"] == [0]


class Counting(BaseEnvironment):
    """Never over by itself but for ``max_steps``, the task's own limit."""

    blocking = False

    def __init__(self, max_steps: int | None) -> None:
        self.max_steps = max_steps

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "go"},))

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult("on")


@pytest.mark.parametrize(("own", "steps_taken", "status"), [(3, 3, "completed"), (None, 4, "truncated")])
async def test_only_a_limit_that_is_not_the_tasks_is_bootstrapped(
    own: int | None, steps_taken: int, status: str, rule_inference: Callable[..., Any], caplog: Any
) -> None:
    algorithm = PPOAlgorithm(
        None, CheckingRun("value"), ["a"], arrived, config(max_steps_per_rollout=4), environment=Counting(own),
        inference=rule_inference(walk),
    )  # fmt: skip
    trajectories = await collected(algorithm)
    assert {(each.status, len(each.steps)) for each in trajectories} == {(status, steps_taken)}
    batch = await algorithm.training_batch(trajectories)
    last = [values[-1] for values in batch.columns["old_values"]]
    assert batch.columns["bootstrap_values"] == (last if status == "truncated" else [0] * len(last))
    assert batch.metrics["bootstrapped"].value() == (len(last) if status == "truncated" else 0)
    assert ("set the environment's max_steps" in caplog.text) == (status == "truncated")
