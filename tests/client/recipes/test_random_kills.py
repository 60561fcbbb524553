"""Every recipe, killed at random moments with its rows left in their file, ends as one that is not disturbed."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradwire.loop.loggers import read_jsonl
from support.chats import chat_model
from support.recipe_settings import RECIPES, write_data
from support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROGRAM = """
import os, signal, sys, threading, time
from gradwire.data import sources
from gradwire.recipes.command import main

large, seconds, whole_group = int(sys.argv.pop(1)), float(sys.argv.pop(1)), int(sys.argv.pop(1))
sources.LARGE_BYTES = large

def die():
    time.sleep(seconds)
    (os.killpg if whole_group else os.kill)(os.getpid(), signal.SIGKILL)

if seconds:
    threading.Thread(target=die, daemon=True).start()
began = time.monotonic()
main()
print("took", time.monotonic() - began)
"""
"""``gradwire train``; files of so many bytes stay on disk, and after so many seconds it is killed, if not 0."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("kills")
    model, teacher = chat_model(folder / "tiny", "marked"), chat_model(folder / "teacher", "marked", seed=1)
    write_data(folder)
    for file in [*folder.glob("*.jsonl")]:
        file.with_suffix(".jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    with Server(model, folder / "state", "--model", f"teacher={teacher}", "--threads", "1") as server:
        yield server, folder


def settings(recipe: str, where: Path, **more: Any) -> Path:
    """Write a configuration of a longer training than the recipe's own."""
    given = RECIPES[recipe] | {"held_out": 0.0, "save_every": 1, "eval_every": 2, "lora_rank": 4} | more
    given["max_steps"] *= 3
    given["validation"] = given["data"]
    if recipe == "distill":
        given["teacher"] = "teacher"
    if "answer_tokens" in given and recipe != "distill":
        given["eval_problems"] = 2
    file = where / f"{Path(given['folder']).name}.yaml"
    file.write_text(json.dumps(given))
    return file


def trained(recipe: str, file: Path, *, large: int = 1 << 40, seconds: float = 0.0, group: bool = False) -> str:
    """What a training prints; empty if it was killed before its end."""
    command = [sys.executable, "-c", PROGRAM, str(large), str(seconds), str(int(group)), recipe, str(file)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, start_new_session=group)
    if seconds and done.returncode == -signal.SIGKILL:
        return ""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if "time" not in name and "second" not in name}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]


def disturbed(recipe: str, whole: Path, killed: Path, *, group: bool = False) -> None:
    took = float(trained(recipe, whole).rpartition("took ")[2])
    seed = time.time_ns()
    drawn = random.Random(seed)
    moments = [drawn.uniform(0.05, 0.7) * took for _ in range(3)]
    for moment in moments:
        trained(recipe, killed, large=1, seconds=moment, group=group)
    trained(recipe, killed, large=1)
    found, expected = metrics(killed.with_suffix("")), metrics(whole.with_suffix(""))
    assert found == expected, (moments, found, expected)
    norms = {line["train/grad_norm"] for line in expected if "train/grad_norm" in line}
    assert len(norms) > 2  # it learns


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_training_ends_as_an_undisturbed_one(recipe: str, served: tuple[Server, Path]) -> None:
    server, folder = served
    common = {"model": "tiny", "address": server.address}
    files = [settings(recipe, folder, folder=f"{recipe}-{name}", **common) for name in ("whole", "killed")]
    disturbed(recipe, *files)


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_its_own_server_may_die_with_it(recipe: str, served: tuple[Server, Path]) -> None:
    _, folder = served
    common = {"model": str(folder / "tiny"), "data": f"{RECIPES[recipe]['data']}.gz"}  # copied to disk at each start
    files = [settings(recipe, folder, folder=f"{recipe}-own-{name}", **common) for name in ("whole", "killed")]
    disturbed(recipe, *files, group=True)
    assert os.path.isdir(folder / f"{recipe}-own-killed" / "server")
