"""The four stages of credit by hand, what is logged of them, and what is kept on disk."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.rl import (
    Action,
    EvaluateResult,
    RewardSandbox,
    RLRolloutWorker,
    SamplingParams,
    StepData,
    StepOutput,
    Task,
    ToolEnvironment,
    Trajectory,
    TrajectoryRecorder,
    align_rewards_with_step_data,
    calculate_advantages,
)
from gradwire.rl.advantages import gae
from gradwire.rl.algorithms.ppo import token_rewards, write_step_advantages
from gradwire.rl.rewards import StepAlignmentError
from gradwire.rl.rewards.functions import to_result
from gradwire.rl.rows import rows_of
from gradwire.rl.viewer import view
from gradwire_losses.advantages import gigpo_advantages


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def judge(messages: Any, ground_truth: str, steps: Any) -> EvaluateResult:
    outputs = [StepOutput(step["index"], 0.25) for step in steps[:-1]]
    last = messages[-1]["content"]
    return EvaluateResult(score=float(ground_truth in last), step_outputs=[*outputs, StepOutput(-1, 1.0)])


def answer(text: str, number: int) -> str:
    if "\ntool: " in text:
        return f"it is {8 if number % 2 else 9}"
    return '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'


async def test_the_four_stages(rule_inference: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gradwire.rl")
    worker = RLRolloutWorker.of(
        ToolEnvironment([double]), rule_inference(answer), Task("4 doubled?", "8"), params=SamplingParams(max_tokens=99)
    )
    raw, messages, truths = [], [], []
    for _ in range(2):
        list_step_data, messages_for_reward_fn, ground_truth = await worker.run_episode()
        raw.append(list_step_data)
        messages.append(messages_for_reward_fn)
        truths.append(ground_truth)
    assert [len(steps) for steps in raw] == [2, 2] and truths == ["8", "8"]
    assert raw[0][0].messages == tuple(messages[0][:-1])

    messages[1] = [*messages[1][:-1], {"role": "assistant", "content": "it is 7"}]
    sandbox = RewardSandbox(judge)
    results = await sandbox.execute_user_reward_code(rollouts_messages=messages, ground_truths=truths)
    sandbox.close()
    assert [each.error for each in results] == ["", ""]
    aligned = align_rewards_with_step_data(eval_results=results, rollout_step_data=raw, mode="batch")
    assert [[step.base_reward for step in steps] for steps in aligned] == [[0.25, 1.0], [0.25, 1.0]]
    scores = [1.0, 0.0]
    done = calculate_advantages(
        batch_of_step_data_lists=aligned,
        final_scores_for_rollouts=scores,
        omega=0.5,
        gamma=0.9,
        state_hashing_function=lambda step: step.index,
        default_step_reward=0.0,
    )
    given = [torch.tensor(each) for each in (scores, [2], [0.25, 1.0, 0.25, 1.0], [2, 2], [0, 1, 0, 1])]
    expected = gigpo_advantages(*given, gamma=0.9, omega=0.5).tolist()
    np.testing.assert_allclose([step.advantage for steps in done for step in steps], expected, rtol=1e-6)

    said = caplog.text
    for what in (
        "observation '4 doubled?'", "understood as (ToolCall(name='double', arguments={'number': 4}),)",
        "log-probabilities [-0.5, ", "policy_value_estimate None",
        "tool double({'number': 4}) gave 8, cost 1", "messages now [{",
        "episode 0.0: 2 steps, completed", "aligner, trajectory 0.0: score",
        "aligner, trajectory 0.1: rewards of steps",
        "A_E  group 0", "anchor state", "G_k  0", "A_S  0", f"A_GiG  group 0 member 0 step 1: {expected[1]:.4g}",
    ):  # fmt: skip
        assert what in said, what


async def test_what_goes_wrong_in_a_stage(rule_inference: Any) -> None:
    class Broken(ToolEnvironment):
        def parse_action(self, state: Any, raw: str) -> Action:
            raise KeyError("broken")

    with pytest.raises(RuntimeError, match="the episode failed: KeyError: 'broken'"):
        await RLRolloutWorker.of(Broken(), rule_inference(answer), "x").run_episode()
    sandbox = RewardSandbox(judge)
    with pytest.raises(ValueError, match="1 rollouts and 2 ground truths"):
        await sandbox.execute_user_reward_code([[{"role": "user", "content": "x"}]], ["a", "b"])
    (failed,) = await sandbox.execute_user_reward_code([[{"role": "user", "content": "x"}]], [3])
    sandbox.close()
    assert "TypeError" in failed.error
    with pytest.raises(StepAlignmentError, match="rollout 0: no reward: judge: TypeError"):
        align_rewards_with_step_data([failed], [[]])
    with pytest.raises(StepAlignmentError, match=r"rollout 0: .* step_index 3"):
        align_rewards_with_step_data(EvaluateResult(1.0, [StepOutput(3, 1.0)]), steps_of("a"), mode="pointwise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="final_scores_for_rollouts has 2 entries for 1"):
        calculate_advantages([steps_of("a")], [1, 2])


@pytest.mark.parametrize("failed", [EvaluateResult(0.0, error="no"), EvaluateResult(1.0, [StepOutput(3, 1.0)])])
def test_a_failed_evaluation_costs_its_own_rollout_only(
    failed: EvaluateResult, caplog: pytest.LogCaptureFixture
) -> None:
    results = [EvaluateResult(1.0), failed, EvaluateResult(0.0), EvaluateResult(0.5)]

    def advantages(kept: list[int]) -> list[list[float]]:
        some = [results[number] for number in kept]
        aligned = align_rewards_with_step_data(some, [steps_of("a", "b") for _ in kept])
        done = calculate_advantages(aligned, [each.score for each in some], gamma=0.9, omega=0.5)
        return [[step.advantage for step in steps] for steps in done]

    with_it = advantages([0, 1, 2, 3])
    assert "left out of the advantages, rollout 1" in caplog.text
    assert with_it.pop(1) == [0.0, 0.0]
    assert with_it == advantages([0, 2, 3]) and any(each != [0.0, 0.0] for each in with_it)


def steps_of(*said: str) -> list[StepData]:
    ids, steps = [1, 2], []
    for index, text in enumerate(said):
        prompt = np.array(ids)
        ids = [*ids, 5, 6, 7]
        messages = ({"role": "assistant", "content": text},)
        written, logprobs = np.array([5, 6]), np.array([-0.5, -1], np.float32)
        key = ("at", index)
        step = StepData(index, f"seen {index}", key, prompt, Action(text), written, logprobs, messages=messages)  # type: ignore[arg-type]
        steps.append(step)
    return steps


async def test_a_score_may_be_left_to_the_steps() -> None:
    verdict = EvaluateResult(step_outputs=[StepOutput(0, 0.5), StepOutput(1, 1.0)])
    assert (verdict.score, verdict.scored_by_steps) == (1.5, True)
    with pytest.raises(ValueError, match="needs a score or step_outputs"):
        EvaluateResult()
    assert to_result({"step_outputs": [{"step_index": 0, "base_reward": 2}]}).score == 2
    with pytest.raises(TypeError, match="at least a score, or step_outputs"):
        to_result({"reason": "none"})
    both = steps_of("a", "b")
    align_rewards_with_step_data([verdict], [both])
    trajectory = Trajectory(Task(""), steps=both, reward=verdict.score, evaluation=verdict)
    (row,) = rows_of([trajectory])
    assert token_rewards(row, trajectory)[row.written].tolist() == [0, 0.5, 0, 1.0]  # and not 1.5 more
    trajectory.evaluation = EvaluateResult(1.5, verdict.step_outputs)
    assert token_rewards(row, trajectory)[row.written].tolist() == [0, 0.5, 0, 2.5]
    sandbox = RewardSandbox(lambda steps: EvaluateResult(step_outputs=[StepOutput(0, 0.5)]))
    (result,) = await sandbox.execute_user_reward_code([[{"role": "assistant", "content": "x"}]], [None])
    sandbox.close()
    assert (result.score, result.scored_by_steps, result.error) == (0.5, True, "")


async def test_what_is_recorded_of_a_step_and_shown(rule_inference: Any, tmp_path: Path) -> None:
    """PPO's advantages too: a step's is the mean of its tokens'."""
    trajectory = Trajectory(Task("t"), steps=steps_of("a", "b"), reward=1.0)
    trajectory.steps[-1].reward = 1.0
    rows = rows_of([trajectory])
    rewards = [token_rewards(rows[0], trajectory)]
    values = [np.where(rows[0].written, 0.25, 0.0)]
    arguments = {"gamma": 0.9, "gae_lambda": 0.8}
    write_step_advantages(rows, [trajectory], rewards, values, np.zeros(1), arguments)
    expected, _ = gae(np.array([0, 0, 0, 1.0]), np.full(4, 0.25), [4], gamma=0.9, gae_lambda=0.8)
    found = [step.advantage for step in trajectory.steps]
    assert found == pytest.approx([expected[:2].mean(), expected[2:].mean()])

    recorder = TrajectoryRecorder(tmp_path / "t.jsonl")
    await recorder.record(0, [trajectory], rule_inference(answer).codec)
    (step, _) = json.loads((tmp_path / "t.jsonl").read_text())["steps"]
    assert (step["state_key"], step["prompt_ids"], step["response_ids"]) == (["at", 0], [1, 2], [5, 6])
    assert (step["logprobs"], step["messages"]) == ([-0.5, -1], [{"role": "assistant", "content": "a"}])
    out = io.StringIO()
    view(tmp_path / "t.jsonl", out=out)
    assert f"advantage {found[0]:+.3g}" in out.getvalue() and f"advantage {found[1]:+.3g}" in out.getvalue()


async def test_a_reward_of_zero_that_is_given_stays() -> None:
    """Two episodes of two steps, of which each result names one; the other takes the default."""
    rollouts = [steps_of("a", "b"), steps_of("a", "b")]
    results = [EvaluateResult(1.0, [StepOutput(0, 0.0)]), EvaluateResult(0.0, [StepOutput(0, 1.0)])]
    aligned = align_rewards_with_step_data(results, rollouts)
    calculate_advantages(aligned, [1.0, 0.0], default_step_reward=2.0)
    assert [[step.reward for step in steps] for steps in aligned] == [[0.0, 2.0], [1.0, 2.0]]
    (steps,) = align_rewards_with_step_data([EvaluateResult(0.5, step_outputs=None)], [steps_of("a", "b")])
    assert [step.reward for step in steps] == [0.0, 0.5]
