"""The small model that the files here compute with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "small", hidden_size=256, num_layers=4)
