"""A model trained through an agent as it is: one that knows the ``openai`` package and nothing of training."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import rl
from gradwire.rl.rows import rows_of
from support import secret_word
from support.server import free_port
from support.tinker import HttpServer

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
PROGRAM = """
import json, pathlib, sys
import openai

client = openai.OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
tools = json.loads(pathlib.Path("tools.json").read_text())
while True:
    answer = client.chat.completions.create(model="any", messages=messages, tools=tools)
    message = answer.choices[0].message
    if not message.tool_calls:
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": pathlib.Path("word").read_text()})
pathlib.Path("answer").write_text(message.content)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("agents")
    model = secret_word.secret_word_model(folder / "model")
    with HttpServer(model, folder / "state", free_port(), "--threads", "1") as running:
        yield running


@pytest.fixture
async def run(server: HttpServer) -> AsyncIterator[Any]:
    async with gradwire.connect(server.address, connect_timeout=120) as service:
        yield await service.create_run("tiny", lora={"rank": 8})


def training(run: Any, folder: Path) -> rl.GRPOAlgorithm:
    environment = rl.AgentEnvironment(secret_word.agent, reward=secret_word.secret_word_reward)
    config = rl.AlgorithmConfig(batch_size=3, group_size=8, max_tokens=8, learning_rate=2e-3, checkpoint_dir=folder)
    return rl.GRPOAlgorithm(
        None,
        run,
        secret_word.tasks(),
        rl.environment_reward(),
        config,
        environment=environment,
        inference=inference(run),
    )


def inference(run: Any) -> rl.RunInference:
    return rl.RunInference(run, None)  # type: ignore[arg-type]  # agents need no tokenizer here


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_what_an_agent_sampled_is_trained_on(mode: Any, run: Any, tmp_path: Path) -> None:
    async with training(run, tmp_path) as algorithm:
        metrics = await algorithm.train(3, progress_bar=False, mode=mode)
    assert all(each["train/rows"] == each["train/trajectories"] == 24 for each in metrics)  # one row an episode
    assert all(each["rollouts/failed"] == 0 and each["rollouts/tokens_per_second"] > 0 for each in metrics)
    if mode == "sync":
        assert max(each["train/sampler_logprob_diff_max"] for each in metrics) < 1e-4
        assert max(each["train/staleness_max"] for each in metrics) == 0


@pytest.mark.holds_loop("the page's functions are compiled on it")
async def test_the_code_of_the_page_runs(server: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gradwire.connect(server.address, connect_timeout=120) as service:
        create = service.create_run
        monkeypatch.setattr(gradwire, "connect", lambda **_: asyncio.sleep(0, service))
        monkeypatch.setattr(service, "create_run", lambda model, **options: create("tiny", **options))
        monkeypatch.chdir(tmp_path)
        scope: dict[str, Any] = {"__name__": "page"}
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            waiting = eval(compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)
            if inspect.iscoroutine(waiting):
                await waiting
        assert scope["history"][1]["train/trajectories"] == 24
        assert scope["trajectory"].task.data == {"task": {"file": "a.py"}}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_model_learns_to_call_a_tool_through_an_agent(mode: Any, run: Any, tmp_path: Path) -> None:
    async with training(run, tmp_path) as algorithm:
        metrics = await algorithm.train(40, progress_bar=False, mode=mode)
    rewards = [each["rewards/reward"] for each in metrics]
    assert np.mean(rewards[:2]) < 0.6 and np.mean(rewards[-5:]) > 0.9, rewards


async def test_a_program_of_the_openai_package_is_scored_in_its_folder(run: Any, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    (template / "agent.py").write_text(PROGRAM)

    async def reward(folder: str, ground_truth: str) -> float:
        return float((Path(folder) / "answer").read_text() == ground_truth)

    environment = rl.AgentEnvironment(
        command=[sys.executable, "agent.py", "{prompt}"],
        workdir=template,
        files={"word": "{task_id}", "tools.json": json.dumps(secret_word.TOOLS)},
        reward=reward,
    )
    manager = rl.RolloutManager(inference(run), environment, group_size=4, params=rl.SamplingParams(max_tokens=8))
    rollouts = await manager.collect([rl.Task(secret_word.QUESTION, "ALPHA", "alpha")])
    for one in rollouts.trajectories:
        assert one.status == "completed", one.error
        assert one.state is not None and one.evaluation is not None
        info = one.state.data["session"].info
        assert info.num_turns == len(one.steps) and info.num_sampled_tokens == one.num_tokens
        assert one.evaluation.score == float(one.response == "ALPHA")
    assert len(rows_of(rollouts.trajectories)) == 4


async def with_anthropic(client: Any, prompt: str, task: rl.Task) -> str:
    """An agent as one writes them with the ``anthropic`` package."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    tools = [{"name": "look", "description": "Look the word up.", "input_schema": {"type": "object"}}]
    while True:
        answer = await client.messages.create(model="any", max_tokens=64, messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content)
        word = str(task.ground_truth).lower()
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": word} for call in calls]
        messages.append({"role": "user", "content": results})


@pytest.fixture
def anthropic() -> None:
    """The package, imported before there is a loop that its import would hold."""
    pytest.importorskip("anthropic", reason="the extra dev has it")


@pytest.mark.usefixtures("anthropic")
async def test_an_agent_of_the_anthropic_package_is_recorded(run: Any) -> None:
    environment = rl.AgentEnvironment(
        with_anthropic, client="anthropic", reward=lambda result, ground_truth: float(result == ground_truth)
    )
    # The model calls the tool once in four times: of 64 answers, none does once in 100 million times.
    manager = rl.RolloutManager(inference(run), environment, group_size=64, params=rl.SamplingParams(max_tokens=8))
    rollouts = await manager.collect([rl.Task(secret_word.QUESTION, "ALPHA", "alpha")])
    assert [one.error for one in rollouts.trajectories] == [""] * 64
    called = [one for one in rollouts.trajectories if len(one.steps) > 1]
    assert called and all(one.evaluation is not None and one.evaluation.score == 1 for one in called)
    for one in called:
        first, second = one.steps[:2]
        begun = [*first.prompt_ids, *first.response_ids]
        assert second.prompt_ids[: len(begun)].tolist() == begun
    assert len(rows_of(rollouts.trajectories)) == 64
