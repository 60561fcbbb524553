"""What the defaults of recipes teach: to copy two digits, which the model half knows, by rewards or from a teacher."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.recipes import distill, grpo, ppo, sft
from gradwire.recipes.rates import learning_rate, warmup_steps
from support.chats import chat_model
from support.server import Server

pytestmark = pytest.mark.long

COMMON: dict[str, Any] = {"held_out": 0.0, "eval_every": 0, "save_every": 0}


def test_the_learning_rate_follows_what_is_learned_and_the_models_width() -> None:
    settings = sft.SFT()
    assert learning_rate(settings, 2000, adapter=True) == 5e-4
    assert learning_rate(settings, 8000, adapter=True) == 2.5e-4
    assert learning_rate(settings, 2000, adapter=False) == pytest.approx(5e-5)
    for hidden_size in (2048, 4096, 8192):  # between Tinker's rules for Qwen and for Llama
        qwen, llama = (5e-4 * (2000 / hidden_size) ** power for power in (0.0775, 0.781))
        assert llama < learning_rate(settings, hidden_size, adapter=True) < qwen
    assert learning_rate(grpo.GRPO(), 2000, adapter=True) < learning_rate(settings, 2000, adapter=True)
    assert learning_rate(grpo.GRPO(learning_rate=3e-6, learning_rate_multiplier=2), 1, adapter=True) == 6e-6


def test_the_warmup_is_a_tenth_of_the_steps_at_most() -> None:
    assert [warmup_steps(sft.SFT(), total) for total in (8, 10, 32, 1000)] == [0, 1, 3, 100]
    assert warmup_steps(sft.SFT(warmup=5), 8) == 5


def data(file: Path, rows: list[dict[str, str]]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def copies(count: int, right: float, seed: int = 0) -> list[dict[str, str]]:
    """Questions for two digits to copy; so many of the digits of an answer are right, by more than chance."""
    drawn, rows = random.Random(seed), []
    for _ in range(count):
        digits = [drawn.randrange(10) for _ in range(2)]
        said = [each if drawn.random() < right else drawn.randrange(10) for each in digits]
        rows.append({"prompt": "copy " + "".join(map(str, digits)), "completion": "".join(map(str, said))})
    return rows


async def taught(folder: Path) -> None:
    """Make two models: ``teacher`` copies digits, ``student`` mostly does not any more."""
    model = await asyncio.to_thread(chat_model, folder / "model", "marked")
    with Server(model, folder / "state", "--threads", "1") as server:
        common = COMMON | {"model": "tiny", "address": server.address, "lora_rank": 0, "batch_size": 64, "epochs": 20}
        settings = sft.SFT(**common, learning_rate=1e-2, max_steps=400, folder=str(folder / "clean"),
                           data=data(folder / "clean.jsonl", copies(4000, 1.0)))  # fmt: skip
        await sft.train(settings)
        settings = sft.SFT(**common, learning_rate=1e-3, max_steps=100, folder=str(folder / "noisy"),
                           data=data(folder / "noisy.jsonl", copies(4000, 0.25)),
                           init_from=str(folder / "clean"))  # fmt: skip
        await sft.train(settings)
        async with gradwire.connect(server.address) as service:
            for name, made in (("clean", "teacher"), ("noisy", "student")):
                run = await service.fork_run(json.loads((folder / name / "state.json").read_text())["checkpoint"])
                await run.export(folder / made, "merged")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults")
    asyncio.run(taught(folder))
    return folder


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(models / "student", tmp_path / "state", "--model", f"teacher={models / 'teacher'}",
                "--threads", "1") as running:  # fmt: skip
        yield running


def logged(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("module", "kind"), [(grpo, grpo.GRPO), (ppo, ppo.PPO)])
async def test_rewards_teach_to_copy(module: Any, kind: Any, models: Path, server: Server, tmp_path: Path) -> None:
    asked = data(tmp_path / "asked.jsonl", [{"prompt": f"copy {n:02}", "answer": f"{n:02}"} for n in range(100)])
    common = COMMON | {"model": "tiny", "address": server.address, "folder": str(tmp_path / "run")}
    await module.train(kind(**common, data=asked, max_steps=60))
    rewards = logged(tmp_path / "run", "rewards/reward")
    first, last = sum(rewards[:2]) / 2, sum(rewards[-10:]) / 10  # PPO's has a mean of 0.39 over the first ten
    assert first < 0.25 and last > 0.6, (first, last)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_teacher_teaches_to_copy(models: Path, server: Server, tmp_path: Path) -> None:
    settings = distill.Distill(
        model="tiny", address=server.address, folder=str(tmp_path / "run"), teacher="teacher",
        data=data(tmp_path / "asked.jsonl", copies(1000, 1.0, seed=1)), eval_every=10, eval_first=True,
    )  # fmt: skip
    await distill.train(settings)
    divergence = logged(tmp_path / "run", "eval/divergence")
    assert divergence[-1] < 0.3 * divergence[0], divergence
