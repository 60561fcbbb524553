"""`pip install gradwire` without extras is a light client: it imports fast, and never torch."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic", "gradwire_losses", "gradwire_server")
PROBE = f"""
import json, sys, time
start = time.process_time()
import gradwire, gradwire.sync
print(json.dumps([time.process_time() - start, sorted(set({HEAVY!r}) & set(sys.modules))]))
"""


def import_client(python: str | Path) -> tuple[float, list[str]]:
    """CPU seconds that the import took in a fresh interpreter, and which heavy packages it drew in."""
    probe = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, cwd="/")
    assert probe.returncode == 0, probe.stderr
    seconds, heavy = json.loads(probe.stdout)
    return seconds, heavy


def test_import_is_fast_and_draws_in_nothing_heavy() -> None:
    tries = [import_client(sys.executable) for _ in range(3)]
    assert [heavy for _, heavy in tries] == [[], [], []]
    assert min(seconds for seconds, _ in tries) < 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plain_installation_imports(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", ROOT], check=True)
    seconds, heavy = import_client(python)
    assert heavy == []
    assert seconds < 3.0  # the first import also compiles
    there = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert there.returncode != 0, "the plain client must not bring torch"
