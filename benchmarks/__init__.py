"""Benchmarks: ``python -m benchmarks`` prints the table, ``python -m benchmarks.NAME`` one row of it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]  # `support` and `_support`, as the tests have them
