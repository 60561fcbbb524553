"""What the results of a run depend on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gradwire_server.engine.process import computed_with


def test_any_change_of_the_code_that_computes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = shutil.copytree(computed_with.ENGINE, tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    before = computed_with._digest_of_code()
    monkeypatch.setattr(computed_with, "ENGINE", copied)
    assert computed_with._digest_of_code() == before
    computing = ("step.py", "training/accumulation.py", "model/packing.py")
    for name, counts in [*((name, True) for name in computing), ("process/loop.py", False)]:
        file = copied / name
        text = file.read_text()
        file.write_text(text + "CHANGED = True\n")
        assert (computed_with._digest_of_code() != before) == counts, name
        file.write_text(text)
