"""The programs of the README, run as a user runs them: a real server, a real model, real updates."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gradwire
import pytest
from _support.small_model import small_model
from gradwire.loop.loggers import read_jsonl
from gradwire.rl import AlgorithmConfig, GiGPOAlgorithm, GRPOAlgorithm, RewardModel, last_number
from gradwire.rl.environments import BaseEnvironment, StepResult
from gradwire.rl.types import Action, State, Task
from support.server import Server, free_port

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(*arguments: str | Path | int, timeout: float = 280) -> str:
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def shown(output: str, name: str) -> float:
    return float(re.findall(rf"{name} ([\d.]+)", output)[-1])


@pytest.mark.long
def test_fifteen_lines(tiny_model_path: Path) -> None:
    program = EXAMPLES / "rl_fifteen_lines.py"
    code = [line for line in program.read_text().splitlines() if line and not line.startswith(("import", "from", "if"))]
    assert len(code) <= 15
    assert shown(run(program, tiny_model_path, 8), "reward") > 0.2  # of 0.05 at the start


def test_a_reward_model_held_by_the_server(server: Server, tmp_path: Path) -> None:
    """Policy and judge are two runs of one server."""

    async def train() -> list[dict[str, float]]:
        config = AlgorithmConfig(batch_size=2, group_size=4, max_tokens=4, checkpoint_dir=tmp_path)
        async with gradwire.connect(server.address) as service:
            judge = await service.create_run("tiny", head="reward")
            policy = await service.create_run("tiny")
            return await GRPOAlgorithm(service, policy, ["ab", "cd"], RewardModel(judge), config).train(2)

    for metrics in asyncio.run(train()):
        assert metrics["rewards/not_scored"] == 0
        assert metrics["rewards/reward"] == metrics["rewards/reward_model"]
        assert metrics["rewards/reward_std"] > 0
        assert metrics["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_fifty_lines(tiny_model_path: Path, seed: int) -> None:
    """It finds what is in boxes that it was not trained on, where a guess is right once in ten, because it looks."""
    program = EXAMPLES / "rl_agent_fifty_lines.py"
    assert sum(line != "" for line in program.read_text().splitlines()) <= 50
    output = run(program, tiny_model_path, 60, seed, timeout=500)
    stages = re.findall(r"^(.+): found ([\d.]+), looked first ([\d.]+)$", output, re.MULTILINE)
    assert [stage for stage, *_ in stages] == ["untrained", "after imitation", "after training"]
    success, looked = ([float(stage[column]) for stage in stages] for column in (1, 2))
    assert success[0] < 0.1 and success[1] < 0.6 and success[2] >= 0.9
    assert looked[0] < 0.3 and looked[1] < 0.7 and looked[2] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gigpo_raises_held_out_success(tmp_path: Path) -> None:
    output = run(EXAMPLES / "gigpo_ppo_training.py", "--output", tmp_path, timeout=500)
    success = [float(each) for each in re.findall(r"held-out success ([\d.]+)", output)]
    assert success[0] < 0.1 and success[-1] > 0.8
    page = tmp_path / "page.html"
    shown_in_terminal = run("-m", "gradwire.rl.viewer", tmp_path / "trajectories.jsonl", "--html", page, "--limit", "1")
    assert "advantage" in shown_in_terminal
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_algorithm_raises_held_out_success(tmp_path: Path) -> None:
    output = run(
        EXAMPLES / "rl_algorithms.py", "--tasks", "sums", "boxes", "--seeds", "1", "--iterations", "12",
        "--output", tmp_path, timeout=2300,
    )  # fmt: skip
    table = re.findall(r"^\| (sums|boxes) \| ([\w-]+) \| ([\d.]+) → ([\d.]+) \|", output, re.MULTILINE)
    assert len(table) == 8
    assert all(float(after) > float(before) for *_, before, after in table)
    assert "held-out success" in (tmp_path / "curves.svg").read_text()


@pytest.mark.slow
def test_every_algorithm_learns_a_task_with_a_limit_of_turns(tmp_path: Path) -> None:
    """Failing by running out of turns is worth nothing: PPO learns as well as those that have no critic."""
    output = run(EXAMPLES / "rl_algorithms.py", "--tasks", "guess", "--seeds", "1", "--output", tmp_path)
    table = re.findall(r"^\| guess \| ([\w-]+) \| ([\d.]+) → ([\d.]+) \|", output, re.MULTILINE)
    assert [name for name, *_ in table] == ["PPO", "GRPO", "REINFORCE", "GiGPO-PPO"]
    assert all(float(before) < 0.5 and float(after) > float(before) + 0.1 for _, before, after in table), table


GSM8K = Path("/work/shared/data/gsm8k/train.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not here")
def test_gsm8k_runs_through_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:400]]
    texts = [row["question"] + row["answer"] for row in rows]
    model = small_model(tmp_path / "m", texts=texts, vocab_size=1024, context_length=512)

    def numbers(folder: str) -> list[dict[str, float]]:
        lines = read_jsonl(tmp_path / folder / "metrics.jsonl")
        kept = ("rewards/", "train/", "eval/", "iteration")
        return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]

    def make(service: Any, run: Any, folder: str) -> GRPOAlgorithm:
        config = AlgorithmConfig(
            batch_size=4, group_size=4, max_tokens=24, learning_rate=1e-3, reference_model="base",
            checkpoint_dir=tmp_path / folder, save_every=2, eval_every=2,
        )  # fmt: skip
        reward = last_number(format_score=0.1)
        return GRPOAlgorithm(service, run, rows[:-8], reward, config, eval_tasks=rows[-8:])

    async def train() -> None:
        async with gradwire.connect(models=[f"small={model}"], state_dir=tmp_path / "state") as service:
            whole = await service.create_run("small", seed=3)
            await make(service, whole, "whole").train(4, progress_bar=False)
            halves = await service.create_run("small", seed=3)
            await make(service, halves, "halves").train(3, progress_bar=False)
            again = make(service, service.get_training_client(halves.run_id), "halves")
            assert await again.resume() == 2
            await again.train(2, progress_bar=False)

    asyncio.run(train())
    first, second = numbers("whole"), numbers("halves")
    assert [line["iteration"] for line in second] == [0, 1, 2, 2, 3]
    assert [*second[:2], *second[3:]] == first


class Walk(BaseEnvironment):
    """Six turns, whatever is said."""

    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "go"},))

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult("on", terminated=state.step == 5)


class SlowWalk(Walk):
    async def step(self, state: State, action: Action) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(0.05)
        return super().step(state, action)


class ServerOn(Server):
    """A server on a port of its own, so that it comes back where it was."""

    def __init__(self, model: Path, state_dir: Path) -> None:
        super().__init__(model, state_dir)
        self._command[self._command.index("127.0.0.1:0")] = f"127.0.0.1:{free_port()}"


def enough(response: str) -> float:
    return float(len(response))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_gone_for_ten_seconds(tiny_model_path: Path, tmp_path: Path) -> None:
    """Killed in the middle of the rollouts, and back ten seconds later: the training goes on, and nothing failed."""
    server = ServerOn(tiny_model_path, tmp_path / "state").start()

    async def outage() -> None:
        await asyncio.sleep(3)
        await asyncio.to_thread(server.end, signal.SIGKILL)
        await asyncio.sleep(10)
        await asyncio.to_thread(server.start)

    async def train() -> list[dict[str, float]]:
        config = AlgorithmConfig(batch_size=2, group_size=4, max_tokens=2)
        async with gradwire.connect(server.address) as service:
            run = await service.create_run("tiny")
            async with GiGPOAlgorithm(service, run, ["a", "b"], enough, config, environment=SlowWalk()) as algorithm:
                gone = asyncio.create_task(outage())
                history = await algorithm.train(12, progress_bar=False)
                await gone
                return history

    history = asyncio.run(train())
    server.end()
    assert [metrics["rollouts/failed"] for metrics in history] == [0] * 12
    assert [metrics["train/trajectories"] for metrics in history] == [8] * 12
    assert max(metrics["time/iteration_s"] for metrics in history) > 8
