"""The tools run with the engine of today; their tables are made by hand, see ``tools/loss_checks.md``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # a process that measures each loss
def test_losses_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    losses = ["dpo", "gkd"]
    small = ["--vocab-size", "64", "--hidden-size", "32", "--layers", "1"]
    tool("measure_losses").main([*losses, "--tokens", "256", "--repeats", "1", *small])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == ["causal_lm", *sorted(losses)]
