"""Ratings that a simple rule gives, and one server for the tests that train."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server import Server


@pytest.fixture(scope="session")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tiny_model_path, tmp_path_factory.mktemp("state"), "--threads", "1").start()
    yield running
    assert running.end() == 0


@pytest.fixture(scope="session")
def ratings() -> list[dict[str, Any]]:
    """Eight letters each, an ``a`` being worth an eighth; sixteen prompts."""
    rng = random.Random(0)
    words = ["".join(rng.choice("ab") for _ in range(8)) for _ in range(96)]
    return [
        {"prompt": f"word {index % 16}: ", "response": word, "score": word.count("a") / 8}
        for index, word in enumerate(words)
    ]
