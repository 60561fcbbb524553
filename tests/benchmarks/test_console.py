"""The memory of open pages. Long form: GRADWIRE_MINUTES=60 pytest -m slow -s tests/benchmarks/test_console.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.console import watch_pages

MINUTES = float(os.environ.get("GRADWIRE_MINUTES", "10"))


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(60 * MINUTES + 3600)
def test_the_memory_of_ten_pages_beside_a_training_stays(tmp_path: Path) -> None:
    assert watch_pages(MINUTES, 10, tmp_path), "what was printed says which bound was passed"
