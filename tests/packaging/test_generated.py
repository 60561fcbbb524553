"""What is generated and committed is what its sources say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.long
def test_loss_reference_is_fresh(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "tools/make_loss_reference.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    fresh = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.md")}
    assert sorted(fresh) == ["losses.md", *sorted(f"losses/{page.name}" for page in (ROOT / "docs/losses").iterdir())]
    for page, text in fresh.items():
        assert text == (ROOT / "docs" / page).read_text(), f"docs/{page} is stale: run `make docs`"


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # by a name that peft uses
def test_the_sizing_table_is_what_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = loaded("make_sizing_table", monkeypatch)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tool.written().splitlines()[2:]]
    assert [row[0] for row in rows] == [model.name for model in tool.MODELS]
    ways = [words for words, _ in tool.WAYS]
    for name, *cells in rows:
        order = []
        for size, cell in zip(tool.DEVICES, cells, strict=True):
            words, _, total = cell.rpartition(": ")
            order.append(ways.index(words) if words else len(ways))
            assert cell == "—" or 0 < float(total) <= 0.9 * size, (name, cell)
        assert order == sorted(order, reverse=True), f"{name}: a larger device trains less thoroughly"
    small = min(tool.DEVICES)
    assert tool.cells(tool.MODELS[0], [small]) == rows[0][1:2], "run `python tools/make_sizing_table.py`"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of ``tools/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
