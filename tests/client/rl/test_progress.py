"""The progress bar: on a terminal, in a notebook, in a log."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from gradwire.loop.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class OutStream(io.StringIO):
    """As a notebook's kernel has it."""

    __module__ = "ipykernel.iostream"


def written(stream: Any, monkeypatch: pytest.MonkeyPatch, *, show: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("gradwire.loop.progress.REFRESH_S", 0.0)
    with Progress("GRPO", 3, show=show) as progress:
        progress.update(1, {"reward": 0.5, "not_scored": 4.0})
        progress.update(3, {"reward": 0.75})
    return str(stream.getvalue())


@pytest.mark.parametrize("stream", [Terminal, OutStream])
def test_one_line_that_changes(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(stream(), monkeypatch)
    first, second, last = text.removeprefix("\r").split("\r")
    assert first.startswith("GRPO ████████░") and first.endswith("1/3 0:00  reward 0.5  not_scored 4")
    assert second.rstrip().endswith("3/3 0:00  reward 0.75") and len(second) == len(first)  # nothing of it is left
    assert last.endswith("\n") and text.count("\n") == 1


def test_one_line_at_the_end_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(io.StringIO(), monkeypatch) == f"GRPO {'█' * 24} 3/3 0:00  reward 0.75\n"


def test_nothing_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(Terminal(), monkeypatch, show=False) == ""
