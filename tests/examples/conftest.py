"""One server for all examples and documents: the small model of sums, under two names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from _support.small_model import small_model
from support.chats import MARKED
from support.server import Server
from transformers import AutoTokenizer

DOCUMENTED_MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="session")
def example_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Holds ``tiny``, and the model that the documents name, with a chat template; both read printable ASCII."""
    folder = tmp_path_factory.mktemp("examples")
    model = small_model(folder / "model", hidden_size=32, num_layers=2)
    documented = shutil.copytree(model, folder / "documented")
    tokenizer = AutoTokenizer.from_pretrained(documented)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(documented)
    server = Server(model, folder / "state", "--model", f"{DOCUMENTED_MODEL}={documented}").start()
    yield server
    assert server.end() == 0


@pytest.fixture
def root() -> Path:
    return Path(__file__).parents[2]
