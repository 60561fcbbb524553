"""The seed document on multi-step rewards (GiGPO): its names, and what the worker logs."""

from __future__ import annotations

import logging
from dataclasses import fields

import gradwire.rl as rl
import pytest
from gradwire.rl.primitives import InferenceModule
from gradwire.rl.primitives.demonstration import random_model


@pytest.mark.parametrize("name", ["TaskDefinitionModel", "AgentPolicy", "OpenAIAgentPolicy", "RLRolloutWorker",
                                  "EvaluateResult", "StepOutput", "StepData", "reward_function", "RewardSandbox",
                                  "align_rewards_with_step_data", "calculate_advantages"])  # fmt: skip
def test_the_names_are_there(name: str) -> None:
    assert name in rl.__all__
    assert callable(getattr(rl, name))


def test_a_task_by_the_documents_name() -> None:
    task = rl.TaskDefinitionModel("2 + 2?", ground_truth="4")
    assert (rl.Task.of(task).prompt, task.ground_truth) == ("2 + 2?", "4")


def test_step_outputs_are_optional() -> None:
    assert list(rl.EvaluateResult(score=0.5, step_outputs=None).step_outputs or ()) == []
    assert rl.EvaluateResult(step_outputs=[rl.StepOutput(step_index=1, base_reward=0.25)]).score == 0.25
    assert {"step_index", "base_reward", "metrics", "reason"} <= {field.name for field in fields(rl.StepOutput)}


class Echo(rl.BaseEnvironment):
    def reset(self, task: rl.Task, seed: int) -> rl.State:
        return rl.State(task, ({"role": "user", "content": str(task.prompt)},))

    def step(self, state: rl.State, action: rl.Action) -> rl.StepResult:
        return rl.StepResult("", terminated=True)


@pytest.fixture(scope="module")
def policy() -> rl.AgentPolicy:
    model, tokenizer = random_model()
    return InferenceModule(model=model, tokenizer=tokenizer, max_new_tokens=3).backend


async def test_the_worker_logs_each_step_and_the_episode(
    policy: rl.AgentPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    worker = rl.RLRolloutWorker.of(Echo(), policy, {"prompt": "2 + 2?", "ground_truth": "4"})
    with caplog.at_level(logging.DEBUG, "gradwire.rl"):
        steps, messages, truth = await worker.run_episode()
    assert (len(steps), truth, messages[0]["content"]) == (1, "4", "2 + 2?")
    assert steps[0].policy_logprobs.shape == steps[0].response_ids.shape
    for word in ("observation", "log-probabilities", "policy_value_estimate", "1 steps, completed"):
        assert word in caplog.text
