"""Every recipe with models of nine families: their architectures, their tokens and their chat templates."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from architecture_configs import SIZES
from gradwire.loop.loggers import read_jsonl
from gradwire.recipes import command
from gradwire.recipes.folder import trained
from support.chats import chat_model
from support.recipe_settings import RECIPES, write_data
from support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 64}),
    "qwen2": ("marked", {}),
    "qwen3": ("qwen", {}),
    "gemma3_text": ("gemma", {"sliding_window": 64}),
    "phi3": ("phi", {}),
    "olmo2": ("olmo", {}),
    "granite": ("granite", {}),
    "glm4": ("glm", {}),
}
"""Architecture -> the form of its chat template, and what its configuration has besides the sizes."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """A server with a model of a family: the family's name, the server's address, and a folder with data."""
    form, more = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {**SIZES, "max_position_embeddings": 512, **more}
    del sizes["vocab_size"]
    model = chat_model(folder / request.param, form, architecture=request.param, config=sizes)
    write_data(folder)
    server = Server(model, folder / "state", "--threads", "1", name=request.param).start()
    yield request.param, server.address, folder
    server.end()


def test_every_recipe_is_tried() -> None:
    assert set(RECIPES) == set(command.RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_recipe_trains(recipe: str, family: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    name, address, folder = family
    monkeypatch.chdir(folder)
    given = {**RECIPES[recipe], "model": name, "address": address, "folder": recipe, "batch_size": 4, "warmup": 0}
    given["held_out"] = 0.25
    if recipe == "distill":  # of what sft trained
        given["teacher"] = trained("sft").checkpoint
    settings = command.settings_of(recipe, given)
    await command.train(recipe, settings)
    lines = read_jsonl(f"{recipe}/metrics.jsonl")
    norms = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    assert len(norms) == given["max_steps"] and all(norms), (norms, lines)
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert "train/grad_norm" in await asyncio.to_thread((folder / recipe / "report.html").read_text)
    async with gradwire.connect(address) as service:
        run = service.get_training_client(trained(recipe).run_id)
        assert trained(recipe).checkpoint in [each.path for each in await run.list_checkpoints()]
