"""The fault table names tests that exist, and every row names one."""

from __future__ import annotations

import re
from pathlib import Path

from gradwire_server.crash_points import POINTS

ROOT = Path(__file__).parents[2]
PROMISE = (
    "an acknowledged operation is executed exactly once, whatever crashes; a result can be fetched until it is"
    " released; a restarted server continues every run from the same state, on CPU bit for bit."
)


def test_every_fault_of_the_table_is_shown_by_a_test_that_exists() -> None:
    assert PROMISE in " ".join((ROOT / "docs" / "reliability.md").read_text().split())
    table = (ROOT / "tests" / "faults" / "README.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| ---"))]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_named_point_is_a_place_in_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    assert set(re.findall(r'crash_point\("([\w.]+)"\)', code)) == set(POINTS)
