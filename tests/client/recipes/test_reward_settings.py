"""Settings that trainings on rewards share with the others."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire import schedules
from gradwire.loop.loggers import read_jsonl
from gradwire.recipes import command
from gradwire.recipes.folder import trained
from gradwire.recipes.settings import SettingsError
from support.chats import chat_model
from support.server import Server

REWARD = "def score(response, ground_truth):\n    return float(len(response) % 3)\n"
COMMON: dict[str, Any] = {
    "model": "tiny", "data": "rows.jsonl", "reward": "reward.py:score", "batch_size": 2, "answer_tokens": 4,
    "held_out": 0.5, "warmup": 1, "lora_rank": 4, "learning_rate": 1e-2, "max_tokens": 64, "save_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("rewards")
    with Server(chat_model(folder / "marked", "marked"), folder / "state", "--threads", "1") as running:
        yield running


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": "1"}}\n' for n in range(8)))


@pytest.mark.long
async def test_schedule_optimizer_and_checkpoints_are_followed(server: Server) -> None:
    given = COMMON | {"address": server.address, "folder": "run", "group_size": 2, "max_steps": 4, "keep": 1}
    more = {"schedule": "linear", "optimizer": "sgd", "optimizer_args": {"momentum": 0.5}, "eval_first": True}
    await command.train("grpo", command.settings_of("grpo", given | more))
    lines = read_jsonl("run/metrics.jsonl")
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates == [schedules.linear(step, peak=1e-2, total=4, warmup=1) for step in range(4)]
    assert lines[0]["iteration"] == 0 and "eval/success" in lines[0]
    kept = read_jsonl("run/trajectories.jsonl")
    assert [each["iteration"] for each in kept] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    report = await asyncio.to_thread(Path("run/report.html").read_text)
    assert all(html.escape(each["steps"][0]["action"]) in report for each in (kept[0], kept[-1]))
    assert report.index("<figcaption>rewards/reward") < report.index("Some answers") < report.index("All figures")
    async with gradwire.connect(server.address) as service:
        run = service.get_training_client(trained("run").run_id)
        names = {each.name for each in await run.list_checkpoints()}
        assert "iteration-4" in names and names <= {"iteration-4", "best"}


@pytest.mark.long
async def test_a_value_head_has_a_rate_of_its_own_and_patience_ends(server: Server) -> None:
    given = COMMON | {"address": server.address, "folder": "run", "answers": 2, "max_steps": 9, "eval_every": 1}
    more = {"head_learning_rate": 1e-3, "patience": 2, "reward": {"reward.py:score": 0.0}}
    await command.train("ppo", command.settings_of("ppo", given | more))
    successes = [line["eval/success"] for line in read_jsonl("run/metrics.jsonl") if "eval/success" in line]
    assert successes == [0.0, 0.0, 0.0]  # the first is the best; two were no better


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("grpo", {"group_size": 1}, "group_size is 1; an answer is judged by the others to its problem: at least 2"),
        ("grpo", {"optimizer": "adam"}, "optimizer is 'adam'; it must be one of adamw"),
        ("sft", {"use_dora": True}, "there is no setting 'use_dora': DoRA's magnitudes are not exact"),
        ("sft", {"data": None}, "data is empty; it must be a text or a list"),
    ],
)
def test_mistakes_are_named(recipe: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        command.settings_of(recipe, given)


@pytest.mark.long
async def test_a_problem_without_an_answer_is_named(server: Server) -> None:
    rows = "".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(8))
    await asyncio.to_thread(Path("rows.jsonl").write_text, rows)
    given = COMMON | {"address": server.address, "folder": "run", "reward": "last_number", "held_out": 0.0}
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, line 1: there is no answer, and the reward last_number compares"
    ):
        await command.train("grpo", command.settings_of("grpo", given))
