"""Rewards: what users may write and return, what is made of it within a group, and to which step it goes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gradwire.errors import ConnectionLostError
from gradwire.rl.rewards import (
    ParetoRewardComputer,
    RewardComputer,
    RewardModel,
    StepAlignmentError,
    SVRLRewardComputer,
    align,
    code_passes,
    crowding_distances,
    environment_reward,
    json_schema,
    last_number,
    normalised_ranks,
    pareto_fronts,
    regex_match,
    reward_function,
)
from gradwire.rl.types import Action, EvaluateResult, State, StepData, StepOutput, Task, Trajectory


def trajectory(*said: str, truth: Any = None, group: int = 0, member: int = 0, **data: Any) -> Trajectory:
    steps = [
        StepData(i, f"seen {i}", i, np.array([1, 2]), Action(text), np.array([3, 4]), np.zeros(2, np.float32))
        for i, text in enumerate(said)
    ]
    task = Task("question", truth)
    messages = ({"role": "user", "content": "question"}, *({"role": "assistant", "content": text} for text in said))
    return Trajectory(task, group, member, steps=steps, messages=messages, state=State(task, data=data))  # type: ignore[arg-type]


class Given:
    """Scores given beforehand."""

    def __init__(self, *scores: float | EvaluateResult) -> None:
        self.scores = scores

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        return [each if isinstance(each, EvaluateResult) else EvaluateResult(each) for each in self.scores]


@reward_function
def polite(messages: list[dict[str, str]], ground_truth: str) -> EvaluateResult:
    last = messages[-1]["content"]
    outputs = [StepOutput(0, 0.5, {"words": len(last.split())}, "greeted")] if "please" in last else []
    return EvaluateResult(score=float(ground_truth in last), step_outputs=outputs, metrics={"length": len(last)})


async def test_a_function_over_messages_in_the_sandbox() -> None:
    one, two = trajectory("tea please", truth="tea"), trajectory("coffee", truth="tea")
    report = await RewardComputer(polite).compute([one, two])
    await asyncio.to_thread(polite.close)
    assert (one.reward, two.reward) == (1, 0)
    assert (one.steps[0].reward, one.steps[0].metrics) == (0.5, {"words": 2})
    assert one.evaluation is not None and one.evaluation.step_outputs[0].reason == "greeted"
    assert report.metrics["rewards/reward"] == 0.5
    assert report.metrics["rewards/length"] == 8


async def test_a_batch_function_sees_a_group_at_a_time() -> None:
    @reward_function(batch=True)
    def longest_wins(response: list[str]) -> list[float]:
        return [float(len(each) == max(map(len, response))) for each in response]

    trajectories = [trajectory("aa"), trajectory("b", group=1), trajectory("c"), trajectory("dd", group=1)]
    await RewardComputer(longest_wins).compute(trajectories)
    await asyncio.to_thread(longest_wins.close)
    assert [each.reward for each in trajectories] == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("good", "returned str; a reward must be a number or an EvaluateResult"),
        (None, "returned NoneType"),
        (math.nan, "the score is nan; it must be finite"),
        ({"points": 1}, "returned a mapping with points; a reward needs at least a score"),
        ({"score": "1"}, "the score is str; it must be a number"),
        ({"score": 1, "step_outputs": [{"step_index": 0.0, "base_reward": 1}]}, "step_index is float"),
        ({"score": 1, "step_outputs": [3]}, "a step output needs at least step_index and base_reward"),
    ],
)
async def test_wrong_answers_cost_one_evaluation_and_say_so(answer: Any, error: str) -> None:
    @reward_function(sandboxed=False)
    def odd(response: str) -> Any:
        return answer if response == "x" else 1.0

    wrong, right = trajectory("x"), trajectory("y")
    report = await RewardComputer(odd).compute([wrong, right])
    assert (right.reward, wrong.reward, wrong.ok) == (1, 0, False)
    assert wrong.evaluation is not None and error in wrong.evaluation.error
    assert report.metrics["rewards/not_scored"] == 1
    assert report.metrics["rewards/reward"] == 1


async def test_a_batch_of_another_size_is_refused() -> None:
    @reward_function(batch=True, sandboxed=False)
    def short(response: list[str]) -> list[float]:
        return [1.0]

    one, two = trajectory("x"), trajectory("y")
    await RewardComputer(short).compute([one, two])
    assert one.evaluation is not None and "returned 1 results for a batch of 2" in one.evaluation.error


async def test_asynchronous_judges() -> None:
    @reward_function
    async def judge(response: str) -> float:
        await asyncio.sleep(0)
        return len(response)

    one = trajectory("four")
    await RewardComputer(judge).compute([one])
    assert one.reward == 4


def test_parameters_that_nothing_fills_are_refused() -> None:
    with pytest.raises(TypeError, match="has a parameter 'answer' that is unknown"):

        @reward_function
        def wrong(answer: str) -> float:
            return 0.0


def test_step_outputs_find_their_steps() -> None:
    three = trajectory("a", "b", "c")
    align(three, EvaluateResult(2.0, [StepOutput(0, 0.1), StepOutput(-1, 0.3)]), default_step_reward=-0.5)
    assert [step.reward for step in three.steps] == [0.1, -0.5, 0.3]
    align(three, EvaluateResult(2.0), default_step_reward=-0.5)
    assert [step.reward for step in three.steps] == [-0.5, -0.5, 1.5]


@pytest.mark.parametrize(
    ("outputs", "error"),
    [
        ([StepOutput(3, 1.0)], r"step_outputs\[0\] has step_index 3, but the trajectory has steps 0 to 2"),
        ([StepOutput(-4, 1.0)], "has step_index -4"),
        ([StepOutput(1, 1.0), StepOutput(-2, 1.0)], r"step_outputs\[1\] and step_outputs\[0\] are both for step 1"),
    ],
)
async def test_indices_that_match_nothing(outputs: list[StepOutput], error: str) -> None:
    three = trajectory("a", "b", "c")
    with pytest.raises(StepAlignmentError, match=error):
        align(three, EvaluateResult(1.0, outputs))
    assert three.evaluation is None
    other = trajectory("d", member=1)
    await RewardComputer(Given(EvaluateResult(1.0, outputs), 0.5)).compute([three, other])
    assert three.evaluation is not None and "trajectory 0.0: step_outputs" in three.evaluation.error  # type: ignore[unreachable]
    assert other.reward == 0.5


async def test_relative_rewards_are_ranks_of_the_group() -> None:
    trajectories = [trajectory("x", group=g) for g in (0, 0, 0, 0, 1)]
    await RewardComputer(Given(5, 1, 5, 9, 3), "relative").compute(trajectories)
    assert [each.reward for each in trajectories] == [0.5, 0, 0.5, 1, 0.5]
    np.testing.assert_array_equal(normalised_ranks([2, 2]), [0.5, 0.5])


async def test_what_failed_is_not_scored() -> None:
    failed, fine = trajectory("x"), trajectory("y")
    failed.status, failed.error = "failed", "RuntimeError: no"
    report = await RewardComputer(Given(1.0)).compute([failed, fine])
    assert (failed.evaluation, fine.reward) == (None, 1)
    assert report.errors == {"RuntimeError: no": 1}


def test_fronts_and_crowding_by_hand() -> None:
    scores = [[1, 5], [3, 3], [5, 1], [2, 2], [0, 0]]
    assert pareto_fronts(scores).tolist() == [0, 0, 0, 1, 2]
    # In the first front the middle one has neighbours at both ends: (5-1)/4 + (5-1)/4.
    assert crowding_distances(scores[:3]).tolist() == [math.inf, 2.0, math.inf]


async def test_pareto_ranks() -> None:
    quality, brevity = Given(1, 3, 5, 2, 0), Given(5, 3, 1, 2, 0)
    trajectories = [trajectory("x") for _ in range(5)]
    await ParetoRewardComputer({"quality": quality, "brevity": brevity}).compute(trajectories)
    assert [each.reward for each in trajectories] == [0.875, 0.5, 0.875, 0.25, 0]
    assert trajectories[0].evaluation is not None
    assert trajectories[0].evaluation.metrics == {"quality": 1, "brevity": 5}


async def test_objectives_may_be_a_list_of_functions() -> None:
    def correct(response: str) -> float:
        return float(response == "x")

    trajectories = [trajectory("x"), trajectory("yy")]
    computer = ParetoRewardComputer([correct, reward_function(sandboxed=False)(lambda response: -len(response))])
    await computer.compute(trajectories)
    await asyncio.to_thread(computer.close)
    assert [each.reward for each in trajectories] == [1, 0]
    assert trajectories[0].evaluation is not None
    assert trajectories[0].evaluation.metrics == {"correct": 1, "<lambda>_1": -1}
    named = ParetoRewardComputer([correct], objective_names=["right"])
    await named.compute(trajectories)
    await asyncio.to_thread(named.close)
    assert trajectories[0].evaluation is not None and trajectories[0].evaluation.metrics == {"right": 1}
    with pytest.raises(ValueError, match="objective_names must be as many different names"):
        ParetoRewardComputer([correct, correct], objective_names=["right", "right"])
    single = RewardComputer(correct)
    await single.compute(trajectories)
    await asyncio.to_thread(single.close)
    assert [each.reward for each in trajectories] == [1, 0]
    with pytest.raises(ValueError, match="For several objectives: ParetoRewardComputer"):
        RewardComputer(correct, "pareto")  # type: ignore[arg-type]


async def test_verification_is_paid_for() -> None:
    dear = trajectory("x", verification_cost=3.0, budget=4.0)
    cheap = trajectory("x", verification_cost=0.0, budget=4.0)
    await SVRLRewardComputer(Given(1, 1), cost_weight=0.4).compute([dear, cheap])
    assert [dear.reward, cheap.reward] == [pytest.approx(0.7), 1]


async def score(scorer: Any, response: str, truth: Any, reason: str = "") -> float:
    (result,) = await scorer.evaluate([trajectory(response, truth=truth)])
    assert result.error == "" and (not reason or result.reason == reason), result
    return float(result.score)


async def test_verifiable_rewards() -> None:
    number = last_number(format_score=0.1)
    right = "so 3 + 4 = 1,007.0 dollars"
    assert await score(number, right, "Sum: #### 1007", "the last number is 1007") == 1
    assert await score(number, "it is 6", "7", "the last number is 6; 7 is right") == 0.1
    assert await score(number, "I do not know", "7", "there is no number in the response") == 0
    pattern = regex_match(r"<answer>\s*yes\s*</answer>")
    assert await score(pattern, "<answer> yes </answer>", None) == 1
    assert await score(pattern, "yes", None) == 0
    await asyncio.to_thread(pattern.close)
    schema = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    typed = json_schema(schema, valid_json_score=0.2)
    assert await score(typed, 'Here: ```json\n{"name": "Ada"}\n```', None) == 1
    assert await score(typed, 'it is {"name": 3} I think', None) == 0.2
    assert await score(typed, "none", None) == 0


async def test_code_is_run_where_it_can_do_no_harm() -> None:
    passes = code_passes()
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]
    assert await score(passes, "```python\ndef add(a, b):\n    return a + b\n```", tests) == 0.5
    assert await score(passes, "import sys; sys.exit(0)", tests) == 0
    await asyncio.to_thread(passes.close)


async def test_a_reward_model_on_the_server() -> None:
    class Run:
        async def compute_rewards(self, batch: Any) -> Any:
            if len(batch["input_ids"]) > 2:
                raise ConnectionLostError("gone")
            return np.array([sum(row) for row in batch["input_ids"]], np.float32)

    model = RewardModel(Run(), center=4, scale=2)
    assert [r.score for r in await model.evaluate([trajectory("a"), trajectory("b")])] == [3, 3]
    assert [r.error for r in await model.evaluate([trajectory("a")] * 3)] == ["the reward model: gone"] * 3
    silent = trajectory()
    verdicts = await model.evaluate([silent, trajectory("a")])
    assert [(r.score, r.error) for r in verdicts] == [(0, "the reward model: the policy wrote nothing"), (3, "")]


async def test_worlds_that_reward() -> None:
    two = trajectory("a", "b", env_rewards=(0.0, 1.0))
    await RewardComputer(environment_reward()).compute([two])
    assert (two.reward, [step.reward for step in two.steps]) == (1, [0, 1])
