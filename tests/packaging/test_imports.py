"""The import rules of the design hold."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_import_rules() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    checked = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_circles_between_the_files_of_the_toolkit() -> None:
    """Imports for type checking count too: a file can be read once those that it names have been."""
    graph = grimp.build_graph("gradwire", exclude_type_checking_imports=False)
    files = {name for name in graph.modules if name.startswith("gradwire.rl")}
    imports = {name: graph.find_modules_directly_imported_by(name) & files for name in files}
    assert len(list(TopologicalSorter(imports).static_order())) == len(files)  # a CycleError names the circle
