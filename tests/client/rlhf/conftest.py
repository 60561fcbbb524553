"""Ratings that a simple rule gives."""

from __future__ import annotations

import random
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ratings() -> list[dict[str, Any]]:
    """Eight letters each, an ``a`` being worth an eighth; sixteen prompts."""
    rng = random.Random(0)
    words = ["".join(rng.choice("ab") for _ in range(8)) for _ in range(96)]
    return [
        {"prompt": f"word {index % 16}: ", "response": word, "score": word.count("a") / 8}
        for index, word in enumerate(words)
    ]
