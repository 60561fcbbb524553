"""The adapters against the libraries themselves, where these are installed; CI has stand-ins for them elsewhere.

`pip install wandb trackio tensorboard gymnasium 'verifiers<0.4' 'transformers[serving]'` in an environment of their own
brings them all. Passed with wandb 0.31.0, trackio 0.43.0, tensorboard 2.21.0, gymnasium 1.4.0, verifiers 0.1.14,
0.2.1 and 0.3.1, and `transformers serve` of 5.23.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.loop.loggers import TensorBoardLogger, TrackioLogger, WandbLogger
from gradwire.rl import RolloutManager, Task
from gradwire.rl.environments import GymnasiumEnvironment, VerifiersEnvironment, verifiers_tasks
from gradwire.rl.inference import OpenAIInference, SamplingParams, TokenizerCodec
from support.server import free_port
from support.stage import wait_for

pytestmark = pytest.mark.filterwarnings("default")  # theirs

METRICS = ({"reward": 0.5, "time/iteration_s": 2.0}, {"reward": 0.75, "lost": float("nan")})


def log_both(logger: Any) -> None:
    for iteration, metrics in enumerate(METRICS):
        logger.log(iteration, metrics)


def test_tensorboard(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    log_both(logger)
    logger.close()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["tensors"]) == {"reward", "time/iteration_s", "lost"}
    values = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("reward")]
    assert values == [(0, 0.5), (1, 0.75)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="p", dir=str(tmp_path))
    log_both(logger)
    assert wandb.run is not None
    assert (wandb.run.step, wandb.run.summary["reward"], wandb.run.summary["time/iteration_s"]) == (1, 0.5, 2.0)
    logger.close()  # sends the last step, which more could have been added to
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_for("wandb's own process", lambda: b"lost" in file.read_bytes())
    assert b"time/iteration_s" in file.read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    logger = TrackioLogger(project="p")
    log_both(logger)
    logger.close()
    with sqlite3.connect(tmp_path / "p.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == [0, 1]
    assert '"reward":0.75' in str(rows[1][1]).replace(" ", "")


@pytest.fixture
def gymnasium() -> Any:
    return pytest.importorskip("gymnasium")


async def test_gymnasium(gymnasium: Any, rule_inference: Callable[..., Any]) -> None:
    async def play(environment: GymnasiumEnvironment, *moves: str) -> Any:
        said = iter(moves)
        rollouts = await RolloutManager(rule_inference(lambda text, n: next(said)), environment).collect([Task("go")])
        assert not rollouts.errors
        return rollouts.trajectories[0]

    lake = GymnasiumEnvironment(lambda task: gymnasium.make("FrozenLake-v1", is_slippery=False), parse=int)
    walked = await play(lake, "right", "9", "1", "1", "2", "2", "1", "2")
    seen = [step.observation for step in walked.steps]
    assert "invalid literal" in seen[1] and seen[2] == "error: 9 is not an action: Discrete(4)"
    assert seen[3:] == ["4", "8", "9", "10", "14"]
    assert walked.state.terminated and walked.state.data["env_rewards"][-1] == 1.0

    class Echo(gymnasium.Env):  # type: ignore[misc]
        observation_space = action_space = gymnasium.spaces.Text(50)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return f"say{self.np_random.integers(1000)}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return action.upper(), 1.0, False, False, {}

    environment = GymnasiumEnvironment(lambda task: gymnasium.wrappers.TimeLimit(Echo(), 2))
    rollouts = await RolloutManager(rule_inference(lambda text, n: "hello!"), environment, group_size=2).collect(["a"])
    first, second = rollouts.trajectories
    assert first.steps[0].observation == second.steps[0].observation  # a group begins in one state
    assert first.steps[1].observation == "HELLO!" and first.state.truncated


@pytest.fixture
def vf() -> Any:
    module = pytest.importorskip("verifiers")
    if not hasattr(module, "MultiTurnEnv"):
        pytest.skip(f"verifiers {module.__version__} has environments of another style")
    return module


async def test_verifiers(vf: Any, rule_inference: Callable[..., Any]) -> None:
    from datasets import Dataset

    class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
        async def setup_state(self, state: Any) -> Any:
            state["tries"] = 0
            return state

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            state["tries"] += 1
            said, number = int(messages[-1].content), int(state["answer"])
            answer = [vf.UserMessage(content="yes" if said == number else "higher")]
            if said == number:
                state["final_env_response"] = answer
            return answer

    data = Dataset.from_list([{"question": "my number?", "answer": "5", "info": {"hint": "odd"}}])
    rubric = vf.Rubric(funcs=[lambda completion, **kwargs: 1.0])
    env = Guess(dataset=data, system_prompt="Guess.", max_turns=3, rubric=rubric)

    async def play(first: int) -> Any:
        inference = rule_inference(lambda text, n: str(first + text.count("higher")))
        rollouts = await RolloutManager(inference, VerifiersEnvironment(env)).collect(verifiers_tasks(env))
        assert not rollouts.errors
        return rollouts.trajectories[0]

    won = await play(4)
    assert [m["content"] for m in won.messages] == ["Guess.", "my number?", "4", "higher", "5", "yes"]
    assert won.state.terminated and won.state.data["verifiers"]["tries"] == 2
    lost = await play(1)
    assert lost.state.terminated and not lost.state.truncated and len(lost.steps) == 3
    single = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "2+2?", "answer": "4"}]), rubric=rubric)
    rollouts = await RolloutManager(rule_inference(lambda text, n: "4"), VerifiersEnvironment(single)).collect(
        verifiers_tasks(single)
    )
    [answered] = rollouts.trajectories
    assert answered.state is not None and answered.state.terminated and answered.messages[-1]["content"] == "4"


@pytest.fixture
def chat_model_path(tiny_model_path: Path, tmp_path: Path) -> Path:
    from transformers import AutoTokenizer

    path = tmp_path / "chat"
    shutil.copytree(tiny_model_path, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def transformers_serve(chat_model_path: Path, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]
    command += [str(chat_model_path), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})

    def answers() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
        except OSError:
            return False
        return True

    try:
        wait_for("transformers serve", answers)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def greedy(chat_model_path: Path) -> Callable[[Any], list[int]]:
    """Five tokens more, by transformers in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(chat_model_path)

    def continued(prompt: Any) -> list[int]:
        ids = model.generate(torch.tensor(np.asarray(prompt)[None]), max_new_tokens=5, do_sample=False)
        return list(ids[0, len(prompt) :].tolist())

    return continued


@pytest.fixture
def codec(chat_model_path: Path) -> TokenizerCodec:
    from transformers import AutoTokenizer

    return TokenizerCodec(AutoTokenizer.from_pretrained(chat_model_path))


@pytest.fixture
def inference(transformers_serve: str, chat_model_path: Path, codec: TokenizerCodec) -> OpenAIInference:
    return OpenAIInference(transformers_serve, str(chat_model_path), codec, send_ids=False)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "pydantic", "openai")),
    reason="transformers serve needs what transformers[serving] brings: fastapi, uvicorn, pydantic, openai",
)
async def test_transformers_serve(
    inference: OpenAIInference, codec: TokenizerCodec, greedy: Callable[[Any], list[int]]
) -> None:
    prompts = await codec.encode(["ab", "abcdef"])
    for prompt, generation in zip(
        prompts, await inference.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
    ):
        assert generation.token_ids.tolist() == greedy(prompt) and generation.stop_reason == "length"
    for refused in (inference.get_logprobs(prompts), inference.get_logits(prompts)):
        with pytest.raises(gradwire.UnsupportedError, match="does not score"):
            await refused
    with pytest.raises(ValueError, match=r"answered 422.*top_k"):
        await inference.generate(prompts, SamplingParams(top_k=3))
    said = [{"role": "user", "content": "ab"}]
    (answer,) = await inference.chat([said], SamplingParams(max_tokens=5, temperature=0))
    prompt = await codec.render(said)
    assert prompt is not None
    assert answer.text == (await codec.decode([greedy(prompt)]))[0] and answer.stop_reason == "length"
