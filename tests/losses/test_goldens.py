"""Losses against numbers of verl 0.9.1 and TRL 1.16, which ``tests/parity/goldens.py`` wrote from their functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Scores
from gradwire_losses.registry import get_loss
from support.losses import read

GOLDENS: dict[str, Any] = json.loads((Path(__file__).parent / "goldens.json").read_text())


@pytest.mark.parametrize("name", GOLDENS)
def test_the_loss_is_the_librarys(name: str) -> None:
    golden = GOLDENS[name]
    spec = get_loss(golden["loss"])
    batch = read(spec, golden["columns"])
    scores = Scores({score: torch.tensor(values, dtype=torch.float64) for score, values in golden["scores"].items()})
    output = spec.function(batch, scores, spec.config(**golden["kwargs"]))
    assert output.loss().item() == pytest.approx(golden["expected"], rel=2e-6, abs=1e-9)
