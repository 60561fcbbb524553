"""What is generated and committed is what its sources say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = Path("gradwire_proto/v1")


@pytest.mark.slow  # the first time, make installs the generators into .venv-proto
@pytest.mark.timeout(900)
def test_generated_modules_are_fresh(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "proto", f"PROTO_OUT={tmp_path}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    fresh = {file.name: file.read_text() for file in (tmp_path / PACKAGE).glob("*_pb2*.py*")}
    committed = {file.name: file.read_text() for file in (ROOT / "proto" / PACKAGE).glob("*_pb2*.py*")}
    assert sorted(fresh) == sorted(committed), "run `make proto` and commit what it writes"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"{stale} differ from the .proto files: run `make proto` and commit what it writes"


def test_loss_reference_is_fresh(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "tools/make_loss_reference.py", str(tmp_path / "losses.md")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    fresh, committed = (tmp_path / "losses.md").read_text(), (ROOT / "docs" / "losses.md").read_text()
    assert fresh == committed, "a loss says something else of itself than docs/losses.md: run `make docs`"
