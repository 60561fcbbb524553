"""The table of ``gradwire evaluate``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gradwire.recipes.evaluate import Scored


def test_answers_that_are_alike_tell_no_more_than_one() -> None:
    """The standard error is that of the prompts' means, where each has as many answers."""
    scores = np.random.default_rng(0).random(40)
    once, often = Scored("once"), Scored("often")
    for score in scores.tolist():
        once.add("g", [score])
        often.add("g", [score] * 16)
    assert once.cell("g") == often.cell("g")
    assert once.cell("g") == f"{scores.mean():.3f} ±{scores.std(ddof=1) / math.sqrt(40):.3f}"


def test_prompts_with_more_answers_count_more() -> None:
    uneven = Scored("uneven")
    uneven.add("g", [1.0, 1.0, 0.0])
    uneven.add("g", [0.0])
    mean, error = (float(each) for each in uneven.cell("g").split(" ±"))
    assert mean == 0.5
    assert error == pytest.approx(math.sqrt(2 * (0.5**2 + 0.5**2)) / 4, abs=1e-3)
