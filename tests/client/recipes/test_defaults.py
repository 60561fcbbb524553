"""What the defaults of trainings on rewards learn: to copy two digits, which the model half knows."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.recipes import grpo, ppo, sft
from gradwire.recipes.rl import learning_rate
from support.chats import chat_model
from support.server import Server


def test_the_learning_rate_follows_the_size_of_the_model() -> None:
    settings = grpo.GRPO()
    assert learning_rate(settings, 600_000_000) == pytest.approx(1e-4)
    assert learning_rate(settings, 8_000_000_000) == pytest.approx(6.5e-5, rel=0.01)
    assert learning_rate(grpo.GRPO(lora_rank=0), 600_000_000) == pytest.approx(1e-5)
    assert learning_rate(grpo.GRPO(learning_rate=3e-6), 1) == 3e-6


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_defaults_learn_to_copy(tmp_path: Path) -> None:
    model, drawn = await asyncio.to_thread(chat_model, tmp_path / "model", "marked"), random.Random(0)

    def row(right: float) -> dict[str, str]:
        digits = [drawn.randrange(10) for _ in range(2)]
        said = [each if drawn.random() < right else drawn.randrange(10) for each in digits]
        return {"prompt": "copy " + "".join(map(str, digits)), "completion": "".join(map(str, said))}

    def data(name: str, rows: list[dict[str, str]]) -> str:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    common: dict[str, Any] = {"held_out": 0.0, "eval_every": 0, "save_every": 0}
    server = Server(model, tmp_path / "state", "--threads", "1").start()
    taught = common | {"model": "tiny", "address": server.address, "lora_rank": 0, "batch_size": 64, "epochs": 20}
    await sft.train(sft.SFT(**taught, learning_rate=1e-2, max_steps=400, folder=str(tmp_path / "clean"),
                            data=data("clean.jsonl", [row(1.0) for _ in range(4000)])))  # fmt: skip
    await sft.train(sft.SFT(**taught, learning_rate=1e-3, max_steps=100, folder=str(tmp_path / "noisy"),
                            data=data("noisy.jsonl", [row(0.25) for _ in range(4000)]),
                            init_from=str(tmp_path / "clean")))  # fmt: skip
    async with gradwire.connect(server.address) as service:
        run = await service.fork_run(json.loads((tmp_path / "noisy" / "state.json").read_text())["checkpoint"])
        await run.export(tmp_path / "base", "merged")
    server.end()
    asked = data("asked.jsonl", [{"prompt": f"copy {n:02}", "answer": f"{n:02}"} for n in range(100)])
    server = Server(tmp_path / "base", tmp_path / "second", "--threads", "1").start()
    try:
        for module, kind in ((grpo, grpo.GRPO), (ppo, ppo.PPO)):
            folder = tmp_path / kind.__name__
            await module.train(
                kind(**common, model="tiny", address=server.address, data=asked, folder=str(folder), max_steps=60)
            )
            lines = [json.loads(line)["rewards/reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
            first, last = sum(lines[:10]) / 10, sum(lines[-10:]) / 10
            assert first < 0.25 and last > 0.6, (kind.__name__, first, last)
    finally:
        server.end()
