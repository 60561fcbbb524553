"""The programs of the README, run as a user runs them: a real server, a real model, real updates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(*arguments: str | Path, timeout: float = 110) -> str:
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def shown(output: str, name: str) -> float:
    return float(re.findall(rf"{name} ([\d.]+)", output)[-1])


def test_fifteen_lines(tiny_model_path: Path) -> None:
    program = EXAMPLES / "rl_fifteen_lines.py"
    code = [line for line in program.read_text().splitlines() if line and not line.startswith(("import", "from", "if"))]
    assert len(code) <= 15
    assert shown(run(program, tiny_model_path, 8), "reward") > 0.2  # of 0.05 at the start


@pytest.mark.slow
def test_fifty_lines(tiny_model_path: Path) -> None:
    program = EXAMPLES / "rl_agent_fifty_lines.py"
    assert len(program.read_text().splitlines()) <= 50
    output = run(program, tiny_model_path, 120)
    assert float(re.findall(r"'eval/success': ([\d.]+)", output)[-1]) >= 0.4  # of 0 at the start


@pytest.mark.slow
def test_gigpo_raises_held_out_success(tmp_path: Path) -> None:
    output = run(EXAMPLES / "gigpo_ppo_training.py", "--output", tmp_path, timeout=300)
    success = [float(each) for each in re.findall(r"held-out success ([\d.]+)", output)]
    assert success[0] < 0.1 and success[-1] > 0.8
    page = tmp_path / "page.html"
    shown_in_terminal = run("-m", "gradwire.rl.viewer", tmp_path / "trajectories.jsonl", "--html", page, "--limit", "1")
    assert "advantage" in shown_in_terminal
    assert page.read_text().startswith("<!doctype html>")
