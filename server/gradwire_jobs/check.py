"""``python -m gradwire_jobs.check PATH NAME``: which lines of a data set no recipe can use, as one JSON object.

This reads what a stranger uploaded, so it is a process of its own with bounded memory, behind the others' processor.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from gradwire.data import DataError
from gradwire.data.layouts import KINDS, Fields
from gradwire.data.rows import Unfit
from gradwire.data.sources import read_file

MEMORY_BYTES = 4 << 30
NICENESS = 10
TOLD = 20
MAX_REASON_CHARS = 300


def main() -> None:
    """Check the file that the command line names."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(NICENESS)
    json.dump(checked(Path(sys.argv[1]), Path(sys.argv[2]).suffix), sys.stdout)


def checked(path: Path, suffix: str) -> dict[str, Any]:
    """Count the rows of a file and those that cannot be used, and describe the first of these."""
    lines = wrong = 0
    problems: list[tuple[int, str]] = []
    try:
        for place, row in read_file(path, suffix):
            lines += 1
            reason = row.reason if isinstance(row, DataError) else _reason(row)
            if reason:
                wrong += 1
                if len(problems) < TOLD:
                    problems.append((_number(place), reason[:MAX_REASON_CHARS]))
    except DataError as error:
        wrong += 1
        problems.append((_number(error.place), error.reason[:MAX_REASON_CHARS]))
    if not lines and not wrong:
        wrong, problems = 1, [(0, "there are no rows")]
    return {"lines": lines, "num_problems": wrong, "problems": problems}


def _reason(row: Any) -> str:
    """Why no recipe can use a row; "" if one can."""
    pairs = any(name in row for name in ("chosen", "chosen_response", "response_chosen", "preferred_output"))
    reasons = []
    for kind in ("preferences",) if pairs else ("conversations", "prompts"):
        try:
            KINDS[kind][0](Fields(row, {}))
        except Unfit as unfit:
            reasons.append(str(unfit))
        else:
            return ""
    return reasons[0]


def _number(place: str) -> int:
    found = re.search(r"(?:line|row) (\d+)$", place)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
