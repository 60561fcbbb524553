"""Benchmarks: ``python -m benchmarks`` prints the table, ``python -m benchmarks.NAME`` one row of it."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]  # `support` and `_support`, as the tests have them
if sys.argv[0] == "-m":  # it is run, not imported by a test: its servers start as a user's do, not as forks
    os.environ["GRADWIRE_TEST_REAL_START"] = "1"
