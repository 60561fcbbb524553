"""What every test gets: quiet threads, an event loop that may not be blocked, a tiny model, GPU tests only with one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

# Before torch or a server process is started: the suite shares a few cores, and results must not depend on how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from support.tiny import tiny_model

BLOCKED_SECONDS = 15.0  # wall time, so a machine that is busy with other things adds to it
RESPONSIVE = (
    "tests/client/",
    "tests/server/core/",
    "tests/server/scheduling/",
    "tests/server/journal/",
    "tests/server/doors/",
)


class _BlockedLoop(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reports: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        took = re.search(r"^Executing .* took ([\d.]+) seconds", message, re.DOTALL)
        if took and float(took[1]) > BLOCKED_SECONDS:
            self.reports.append(message)


@pytest.fixture(autouse=True)
def responsive_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test of the client or the front whose event loop was held for longer than that."""
    if not request.node.nodeid.startswith(RESPONSIVE) or not request.node.get_closest_marker("asyncio"):
        yield
        return
    handler, logger = _BlockedLoop(), logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if handler.reports:
        pytest.fail("the event loop was blocked:\n" + "\n".join(handler.reports))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some ten thousand parameters with a character tokenizer, as a Hugging Face folder."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
