"""The walk of one ``forward_backward`` in docs/architecture.md is the one that the three processes really take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import Server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALK = ROOT / "tests" / "support" / "walk"
ROOTS = ("client", "server", "losses", "proto")
BESIDE = {
    "server/gradwire_server/engine_link/vitals.py",  # where a heartbeat, one a second, arrives during the call
    "server/gradwire_server/engine/training/optimizer.py",  # counts the run's bytes once the answer is under way
}
"""Executed or not, as the moment has it."""
LEADING = 35
"""Files that lead through the walk; the others are called by them."""


def rows() -> list[list[str]]:
    section = PAGE.partition("## One batch's walk")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")][
        2:
    ]


def files(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`((?:client|server|losses|proto)/[\w/]+\.py)`", cell)]


def executed(folder: Path) -> set[str]:
    """The project's own files among those that were recorded, generated ones left out."""
    names = {name for file in folder.glob("files-*") for name in file.read_text().splitlines()}
    own = {str(ROOT / root) for root in ROOTS}
    found = {os.path.relpath(name, ROOT) for name in names if any(name.startswith(f"{root}/") for root in own)}
    return {name for name in found if "_pb2" not in name}


def test_the_page_names_exactly_the_files_that_one_forward_backward_executes(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_WALK", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(WALK))
    server = Server(tiny_model_path, tmp_path / "state").start()
    try:
        subprocess.run([sys.executable, WALK / "one_call.py", server.address], check=True, timeout=120)
    finally:
        assert server.end() == 0
    leading, called = files([row[1] for row in rows()]), files([row[2] for row in rows()])
    named = [*leading, *called]
    assert len(named) == len(set(named)) and 20 < len(leading) <= LEADING
    walked = executed(tmp_path) - BESIDE
    assert walked - set(named) == set(), "executed, and not on the page"
    assert set(named) - walked == set(), "on the page, and not executed"
    assert f"{len(walked)} files in all" in PAGE
