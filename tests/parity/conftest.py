"""Parity with TRL, verl and Liger, on CPU, in their own conventions. Skipped where they are not installed: see
``requirements.txt``. Where one of them does otherwise, the test says which, and why we do not."""

from __future__ import annotations

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import pytest


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/parity/" in item.nodeid or item.nodeid.startswith("parity/"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
