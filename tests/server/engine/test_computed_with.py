"""What the results of a run depend on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from gradwire_server.engine.process import computed_with
from gradwire_server.engine.process.computed_with import ComputedWith


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


def test_digests_of_a_models_files_are_read_again_when_what_kept_them_is_damaged(tmp_path: Path) -> None:
    """One flipped bit parked every run, as its base model had become another."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    kept = tmp_path / computed_with.HASHES
    first = ComputedWith(Any, tmp_path)._digest_of_files(tmp_path / "model")
    whole = kept.read_bytes()
    digit = whole.rindex(b'"blake2b"') - 20  # of the file's digest
    for damaged in (whole[:digit] + bytes([whole[digit] ^ 1]) + whole[digit + 1 :], whole[:-9], b"{}", b"[]"):
        kept.write_bytes(damaged)
        assert ComputedWith(Any, tmp_path)._digest_of_files(tmp_path / "model") == first
        assert kept.read_bytes() == whole
