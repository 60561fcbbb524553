"""One server for all examples and documents: the small model of sums, under two names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _support.small_model import small_model
from support.server import Server

DOCUMENTED_MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="session")
def example_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Holds ``tiny``, and the model that the documents name; both read printable ASCII."""
    folder = tmp_path_factory.mktemp("examples")
    model = small_model(folder / "model", hidden_size=32, num_layers=2)
    server = Server(model, folder / "state", "--model", f"{DOCUMENTED_MODEL}={model}").start()
    yield server
    assert server.end() == 0


@pytest.fixture
def root() -> Path:
    return Path(__file__).parents[2]
