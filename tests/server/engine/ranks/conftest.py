"""An engine of one process and one of several ranks, which all modules here share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chats import chat_model
from support.engine import EngineProcess, LocalEngine
from support.ranks import FAILING, Engines

SHORT, *LONG = [(2, "off"), (4, "off"), (2, "on"), (4, "on")]
"""How many ranks, and whether models are divided among them."""


@pytest.fixture(
    scope="package",
    params=[SHORT, *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)],
    ids=lambda param: f"{param[0]}-{'divided' if param[1] == 'on' else 'whole'}",
)
def engines(
    request: pytest.FixtureRequest, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "losses.py").write_text(FAILING)
    settings: dict[str, Any] = {"microbatch_tokens": 16, "threads": 1, "losses": [folder / "losses.py"]}
    models = {"tiny": tiny_model_path, "chats": chat_model(folder / "chats", "qwen")}
    ranks, shard = request.param
    group = EngineProcess(models, folder / "group", ranks=ranks, shard=shard, **settings)
    yield Engines(LocalEngine(models, folder / "one", **settings), group, folder)
    group.kill()
