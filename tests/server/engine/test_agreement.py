"""What an engine does depends on its decisions and on what its processes agree on, and on nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gradwire_server.engine

ENGINE = Path(gradwire_server.engine.__file__).parent
MAY_ASK = {"agreement.py", "group_agreement.py", "operations/decisions.py"}
"""The files that choose by what their process sees."""
ASKS_THE_WORLD = {
    "time.time", "time.monotonic", "time.time_ns", "time.monotonic_ns", "datetime.now", "datetime.utcnow",
    "mem_get_info", "memory_reserved", "memory_allocated", "max_memory_allocated", "free_memory", "resident_bytes",
    "seconds_on", "virtual_memory", "disk_usage", "CrashMarks", "crash_marks", "is_out_of_memory", "OutOfMemoryError",
    "MemoryError", "randbits", "urandom", "randbelow", "uuid4",
}  # fmt: skip
"""Names by which code reads the clock, the front's marks, free memory or chance, or finds that memory ran out.

``time.perf_counter`` is not among them: durations are reported, and those that something is chosen by are measured by
``seconds_on``, or where there is one rank (``sampling/pace.py``)."""
REPORTS = {
    "machine.py": "makes the readings",
    "failures.py": "says which errors mean that memory ran out",
    "process/__main__.py": "ends the process when its lease is over",
    "process/heartbeat.py": "tells the front, and chooses nothing",
    "process/pulse.py": "tells rank 0, and chooses nothing",
    "process/ranks.py": "opens the page of marks",
    "model/split_check.py": "explains other errors of a model's own code at load",
    "state/checkpoints.py": "writes the time into a manifest",
    "operations/training.py": "words an error",
    "sampling/pages/replay.py": "lets the error pass",
    "sampling/speculation.py": "drafts nothing then, which draws the same tokens; never in lock step",
}
"""Files that use such names and choose nothing by them."""


def asked(file: Path) -> Iterator[str]:
    """The names of ``ASKS_THE_WORLD`` that a file uses, other than to raise an error or through the agreement."""
    tree = ast.parse(file.read_text())
    raised = {part for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    for node in set(ast.walk(tree)) - raised:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if not owner.endswith("agreement"):
                yield from {node.attr, f"{owner}.{node.attr}"} & ASKS_THE_WORLD
        elif isinstance(node, ast.Name):
            yield from {node.id} & ASKS_THE_WORLD
        elif isinstance(node, ast.ImportFrom):
            yield from {alias.name for alias in node.names} & ASKS_THE_WORLD
            yield from {f"{node.module}.{alias.name}" for alias in node.names} & ASKS_THE_WORLD


def test_only_decisions_and_the_agreement_ask_the_world() -> None:
    files = {file.relative_to(ENGINE).as_posix(): sorted(set(asked(file))) for file in ENGINE.rglob("*.py")}
    asking = {name for name, names in files.items() if names}
    assert {name: files[name] for name in asking - MAY_ASK - set(REPORTS)} == {}
    assert asking >= MAY_ASK
    assert set(REPORTS) <= asking, "an exception without need: remove it"
