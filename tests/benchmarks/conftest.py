"""The benchmarks are a package at the repository's root, which is on no path by default."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
