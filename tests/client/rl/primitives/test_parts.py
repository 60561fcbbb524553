"""The synchronous parts over a sampler that answers by rule: environments, rollouts, rewards, tools."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gradwire.rl import EvaluateResult
from gradwire.rl.primitives import (
    BackpropConfig,
    BackpropModule,
    BaseEnvironment,
    ConversationEnvironment,
    InferenceModule,
    ParetoRewardComputer,
    RolloutConfig,
    RolloutManager,
    SimpleTextEnvironment,
    State,
    SVRLEnvironment,
    SVRLRewardComputer,
    Trajectory,
    VLLMBackend,
    register_tool,
    tools,
)
from gradwire.rl.primitives.algorithms import AlgorithmConfig, PPOAlgorithm
from gradwire.rl.primitives.backprop import settings_of
from gradwire.rl.primitives.rewards import ComputedRewards

Answer = Callable[[str, int], str]


@pytest.fixture
def policy(rule_inference: Any) -> Callable[[Answer], InferenceModule]:
    def make(answer: Answer) -> InferenceModule:
        return InferenceModule(rule_inference(answer), max_new_tokens=100)

    return make


class MyEnvironment(BaseEnvironment):
    """As a user writes one: with a loop of its own that asks for what it needs."""

    def reset(self) -> State:
        return State(prompt="Your task...")

    def step(self, state: State) -> State:
        response = self.inference.generate([state.prompt])[0]
        state.response = response
        state.step_count += 1
        return state

    def is_terminal(self, state: State) -> bool:
        return state.step_count >= 10 or "DONE" in state.response

    def build_prompt(self, state: State) -> Any:
        return state.prompt

    def update_state(self, state: State, response: str) -> State:
        state.response = response
        return state


def test_an_environment_with_a_loop_of_its_own(policy: Any) -> None:
    inference = policy(lambda text, number: "DONE" if number % 3 == 0 else "more")
    manager = RolloutManager(
        MyEnvironment(inference),
        RolloutConfig(num_parallel=32, maintain_parallel_count=False, verbose=True, enable_progress_bar=False),
    )
    trajectories = manager.collect_rollouts(min_trajectories=100, max_steps_per_rollout=50)
    assert len(trajectories) == 100
    lengths = [len(each.steps) for each in trajectories]
    assert min(lengths) == 1 and max(lengths) <= 10 and len(set(lengths)) > 2
    for each in trajectories:
        assert [step.action.raw for step in each.steps[:-1]] == ["more"] * (len(each.steps) - 1)
        assert each.response == "DONE" or len(each.steps) == 10
        assert all(len(step.response_ids) == len(step.logprobs) > 0 for step in each.steps)
        assert each.status == "completed"
    assert manager.get_statistics()["avg_trajectory_length"] == pytest.approx(np.mean(lengths))
    assert max(inference.backend.batches) == 32  # those that wait go to the sampler together


def test_episodes_that_are_cut_and_threads_that_end(policy: Any) -> None:
    manager = RolloutManager(MyEnvironment(policy(lambda text, number: "more")), num_parallel=16)
    cut = manager.collect_rollouts(min_trajectories=4, max_steps_per_rollout=3)
    assert [(each.status, len(each.steps)) for each in cut] == [("truncated", 3)] * 4
    for thread in threading.enumerate():
        if thread.name == "gradwire episode":
            thread.join(5)
            assert not thread.is_alive()


def test_a_failing_episode_costs_itself(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(MyEnvironment):
        def step(self, state: State) -> State:
            state = super().step(state)
            if state.response == "bad":
                raise ValueError("a bad answer")
            return state

    inference = policy(lambda text, number: "bad" if number % 2 else "DONE")
    manager = RolloutManager(Fails(inference), num_parallel=16)
    trajectories = manager.collect_rollouts(min_trajectories=16)
    failed = manager.get_statistics()["failed"]
    assert 0 < failed < 16 and len(trajectories) == 16 - failed
    assert f"{failed} of 16 episodes failed: ValueError: a bad answer" in caplog.text
    with pytest.raises(RuntimeError, match="all 2 episodes failed: ValueError: a bad answer"):
        RolloutManager(Fails(policy(lambda text, number: "bad"))).collect_rollouts(2)


def test_what_goes_on_for_ever_without_the_policy_is_told(policy: Any) -> None:
    class Idle(MyEnvironment):
        def step(self, state: State) -> State:
            return state

    with pytest.raises(RuntimeError, match=r"without asking self\.inference"):
        RolloutManager(Idle(policy(lambda text, number: ""))).collect_rollouts(1)
    with pytest.raises(ValueError, match="MyEnvironment has no inference"):
        RolloutManager(MyEnvironment()).collect_rollouts(1)


def test_prompts_in_turn_and_steps_that_continue(policy: Any) -> None:
    env = SimpleTextEnvironment(inference=policy(lambda text, number: "!"), prompts=["a", "b"], max_steps=2)
    trajectories = RolloutManager(env, num_parallel=4).collect_rollouts(3)
    assert [each.task.prompt for each in trajectories] == ["a", "b", "a"]
    first = trajectories[0]
    assert [step.observation for step in first.steps] == ["a", "a"]
    assert first.steps[0].state_key != first.steps[1].state_key
    # The second prompt begins with exactly the tokens that were sampled.
    told = [*first.steps[0].prompt_ids, *first.steps[0].response_ids]
    assert first.steps[1].prompt_ids[: len(told)].tolist() == told
    with pytest.raises(ValueError, match="prompts is empty"):
        SimpleTextEnvironment(inference=env.inference)


def test_a_group_starts_from_one_state(policy: Any) -> None:
    from gradwire.rl.primitives.background import wait_for
    from gradwire.rl.primitives.running import EpisodeEnvironment
    from gradwire.rl.rollouts import RolloutManager as AsyncRolloutManager

    class Drawn(MyEnvironment):
        def reset(self) -> State:
            return State(prompt=f"number {random.random()} {self.rng.random()}", data={"seen": []})

        def update_state(self, state: State, response: str) -> State:
            state.data["seen"].append(response)
            return state

    env = Drawn(policy(lambda text, number: f"DONE {number}"))
    manager = AsyncRolloutManager(env.inference.backend, EpisodeEnvironment(env), group_size=4)
    groups = wait_for(manager.collect(["x", "y"])).groups()
    starts = [{each.steps[0].observation for each in group} for group in groups]
    assert [len(each) for each in starts] == [1, 1] and starts[0] != starts[1]


def test_a_conversation(policy: Any) -> None:
    env = ConversationEnvironment(
        inference=policy(lambda text, number: "hi"),
        prompts=["hello"],
        respond=lambda state: None if len(state.prompt) > 4 else "and?",
        system="be brief",
    )
    (one,) = RolloutManager(env).collect_rollouts(1)
    said = [(message["role"], message["content"]) for message in one.messages]
    assert said[:4] == [("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "and?")]
    assert len(one.steps) == 3


def test_verification_with_tools_within_a_budget(policy: Any) -> None:
    def answer(text: str, number: int) -> str:
        if "\ntool: " in text:
            return "<answer>12</answer>"
        return '<tool_call>{"name": "calculator", "arguments": {"expression": "3 * 4"}}</tool_call>'

    env = SVRLEnvironment(policy(answer), ["calculator"], budget=10.0, prompts=[{"prompt": "3*4?", "ground_truth": 12}])
    trajectories = RolloutManager(env).collect_rollouts(2)
    assert [len(each.steps) for each in trajectories] == [2, 2]
    assert trajectories[0].steps[0].tool_results[0].content == "12"
    assert SVRLRewardComputer().compute_rewards(trajectories) == pytest.approx([1 - 0.2 * 1 / 10] * 2)
    assert SVRLRewardComputer().compute_rewards(trajectories, method="relative") == [0.5, 0.5]
    with pytest.raises(ValueError, match="trajectory 0 could not be scored: ValueError: the task has no ground_truth"):
        SVRLRewardComputer().compute_rewards([Trajectory(trajectories[0].task.of("x"), state=trajectories[0].state)])


def test_environments_mix(policy: Any) -> None:
    class MyParetoEnv(BaseEnvironment):
        def build_prompt(self, state: State) -> Any:
            return [*state.prompt, {"role": "user", "content": "be short"}]

    class Combined(MyParetoEnv, SVRLEnvironment):
        pass

    seen = []
    env = Combined(policy(lambda text, number: seen.append(text) or "<answer>1</answer>"), ["calculator"], budget=10.0)
    env.prompts = SimpleTextEnvironment(prompts=["q"]).prompts
    (one,) = RolloutManager(env).collect_rollouts(1)
    assert one.state is not None and one.state.data["answer"] == "1"
    assert "user: be short" in seen[0] and "calculator" in seen[0]


def trajectories_of(policy: Any, *responses: str) -> list[Trajectory]:
    answers = iter(responses)
    env = SimpleTextEnvironment(policy(lambda text, number: next(answers)), prompts=["p"])
    return RolloutManager(env, num_parallel=1).collect_rollouts(len(responses))


def test_pareto(policy: Any) -> None:
    def accuracy_fn(t: Trajectory) -> float:
        return t.response.count("a")

    def efficiency_fn(t: Trajectory) -> float:
        return -len(t.response)

    def safety_fn(t: Trajectory) -> float:
        return 0.0

    trajectories = trajectories_of(policy, "aa", "a", "bbb", "bb")
    computer = ParetoRewardComputer(
        objective_functions=[accuracy_fn, efficiency_fn, safety_fn],
        objective_names=["accuracy", "efficiency", "safety"],
    )
    rewards = computer.compute_rewards(trajectories, method="pareto")
    # "aa" and "a" dominate nothing of each other and all else; "bbb" is dominated by "bb" as well.
    assert rewards == pytest.approx([5 / 6, 5 / 6, 0, 1 / 3])
    assert trajectories[0].evaluation is not None
    assert trajectories[0].evaluation.metrics == {"accuracy": 2, "efficiency": -2, "safety": 0}
    assert computer.compute_rewards(trajectories, method="absolute") == pytest.approx([0, 0, -1, -2 / 3])
    assert ParetoRewardComputer(objectives=[accuracy_fn, efficiency_fn]).compute_rewards(trajectories) == rewards
    unnamed = ParetoRewardComputer(objectives=[lambda t: t.response.count("a"), lambda t: -len(t.response)])
    assert unnamed.compute_rewards(trajectories) == rewards
    assert trajectories[0].evaluation.metrics == {"<lambda>_0": 2, "<lambda>_1": -2}
    with pytest.raises(ValueError, match="need as many different names"):
        ParetoRewardComputer([accuracy_fn], ["a", "b"])
    with pytest.raises(ValueError, match='method must be "absolute"'):
        computer.compute_rewards(trajectories, method="best")  # type: ignore[arg-type]


async def test_any_object_with_compute_rewards() -> None:
    class Rewards:
        def __init__(self, rewards: Any) -> None:
            self.rewards = rewards

        def compute_rewards(self, trajectories: Any, method: str = "absolute") -> Any:
            if isinstance(self.rewards, Exception):
                raise self.rewards
            return [method, *self.rewards][1:]

    class Simple:
        def compute_rewards(self, trajectories: Any) -> Any:
            return np.ones(len(trajectories))

    two: Any = [object(), object()]
    assert [each.score for each in await ComputedRewards(Simple()).evaluate(two)] == [1, 1]
    results = await ComputedRewards(Rewards([1, EvaluateResult(0.5)]), "relative").evaluate(two)
    assert [each.score for each in results] == [1, 0.5]
    results = await ComputedRewards(Rewards([float("nan"), "x"])).evaluate(two)
    assert [each.error.split("; ")[0] for each in results] == [
        "Rewards: the score is nan", "Rewards: returned str"
    ]  # fmt: skip
    assert "returned 3 rewards for 2" in (await ComputedRewards(Rewards([1, 2, 3])).evaluate(two))[0].error
    assert "KeyError: 'x' (line" in (await ComputedRewards(Rewards(KeyError("x"))).evaluate(two))[1].error
    with pytest.raises(TypeError, match="must have compute_rewards"):
        ComputedRewards(len)


def test_tools_by_name(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_tools", {"calculator": tools._tools["calculator"]})  # not what other tests registered

    def answer(text: str, number: int) -> str:
        if "\ntool: " in text:
            return "found: " + text.rsplit("\ntool: ", 1)[1].split("\n")[0]
        name, arguments = ("search", '{"query": "x"}') if "who" in text else ("calculator", '{"expression": "2**10"}')
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    inference = policy(answer)
    with pytest.raises(ValueError, match="there is no tool 'search': register_tool"):
        inference.batch_generate_with_tools(["who?"], available_tools=["calculator", "search"])

    def search(query: str) -> str:
        """Look something up."""
        return f"results for {query}"

    register_tool(search)
    responses, tool_calls = inference.batch_generate_with_tools(
        ["who?", "2**10?"], available_tools=["calculator", "search"], max_new_tokens=100
    )
    assert responses == ["found: results for x", "found: 1024"]
    assert [(each[0].call.name, each[0].content) for each in tool_calls] == [
        ("search", "results for x"), ("calculator", "1024")
    ]  # fmt: skip


def test_a_backend_by_name(monkeypatch: pytest.MonkeyPatch, rule_inference: Any) -> None:
    """vLLM's is made by name, with what it takes to receive weights."""
    made: dict[str, Any] = {}

    class Tokenizer:
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1, *map(ord, text)]

    class Engine:
        def __init__(self, name: str, **options: Any) -> None:
            made.update(options, name=name)

        def get_tokenizer(self) -> Any:
            return Tokenizer()

        def generate(self, prompts: Any, params: Any, **options: Any) -> Any:
            token = SimpleNamespace(logprob=-0.5)
            output = SimpleNamespace(
                token_ids=[7, 8], logprobs=[{7: token}, {8: token}], text="hi", finish_reason="length", stop_reason=None
            )
            made["params"] = params
            return [SimpleNamespace(outputs=[output]) for _ in prompts]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))  # type: ignore[misc]
    inference = InferenceModule("meta-llama/Llama-2-7b-hf", backend="vllm", max_model_len=100)
    assert isinstance(inference.backend, VLLMBackend)
    assert (made["name"], made["max_model_len"], made["logprobs_mode"]) == (
        "meta-llama/Llama-2-7b-hf", 100, "processed_logprobs"
    )  # fmt: skip
    (text,) = inference.generate(["a prompt"], max_new_tokens=100)
    assert (text, text.token_ids.tolist(), made["params"]["max_tokens"]) == ("hi", [7, 8], 100)
    with pytest.raises(ValueError, match="returns only the most probable tokens"):
        inference.get_logits(["a"], ["b"])


@pytest.mark.parametrize(
    ("expression", "result"),
    [("2 * (3 + 4) - -1", "15"), ("7 // 2 + 7 % 2", "4"), ("1 / 4", "0.25"), ("2 ** 0.5", str(2**0.5))],
)
def test_the_calculator(expression: str, result: str) -> None:
    from gradwire.rl.primitives.tools import calculator

    assert calculator(expression) == result


@pytest.mark.parametrize("expression", ["__import__('os')", "9**9**9**9", "x", "(-1) ** 0.5", "1 if 1 else 2"])
def test_what_the_calculator_refuses(expression: str) -> None:
    from gradwire.rl.primitives.tools import calculator

    with pytest.raises(ValueError):
        calculator(expression)


def test_advantages_of_given_rewards_and_values() -> None:
    plain = BackpropModule("a model", config=BackpropConfig(gamma=0.5, gae_lambda=1.0, normalize_advantages=False))
    assert plain.compute_advantages([1.0, 0.0], [0.25, 0.5]).tolist() == [0.75, -0.5]
    first, second = plain.compute_advantages([[0, 0, 1], [2]], [[0, 0, 0], [1]])
    assert (first.tolist(), second.tolist()) == ([0.25, 0.5, 1], [1])
    whitened = BackpropModule("a model").compute_advantages([1.0, 2.0, 3.0])
    assert (whitened.mean(), whitened.std(ddof=1)) == (pytest.approx(0), pytest.approx(1))
    with pytest.raises(ValueError, match="differ in shape"):
        plain.compute_advantages([[1, 2]], [[1]])


def test_optimizers_that_the_server_has_and_has_not() -> None:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert settings_of(torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)) == {
        "learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1
    }  # fmt: skip
    for optimizer in (torch.optim.SGD(parameters, lr=1.0), torch.optim.Adam(parameters, weight_decay=0.1)):
        with pytest.raises(ValueError, match=r"AdamW"):
            settings_of(optimizer)


def test_settings_that_have_another_place(policy: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens: set these on the RolloutManager or the InferenceModule"):
        AlgorithmConfig(max_tokens=7)
    with pytest.raises(ValueError, match="save_every needs a checkpoint_dir"):
        AlgorithmConfig(save_every=2)
    with pytest.raises(ValueError, match="needs an inference module, and the algorithm a backprop"):
        PPOAlgorithm(MyEnvironment(policy(lambda text, number: "")))
    with pytest.raises(ValueError, match='backend must be "hf", "vllm" or "server"'):
        InferenceModule("x", backend="gpu")


def test_the_package_is_light() -> None:
    code = "import sys, gradwire.rl.primitives; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


@pytest.mark.parametrize(("name", "end"), [("environment", "steps on average"), ("inference", "2 answers")])
def test_demonstrations(
    name: str, end: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_module(f"gradwire.rl.primitives.{name}", run_name="__main__")
    assert capsys.readouterr().out.strip().endswith(end)
