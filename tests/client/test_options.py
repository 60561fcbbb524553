"""Keyword arguments that a function does not have are named, with those that it has."""

from __future__ import annotations

import gradwire
import pytest
from gradwire.wire.options import check_options


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("num_samples", r"sample\(\) has no argument 'num_samples'; it takes self, prompts, n, .*, max_tokens, "),
        ("timeot", "did you mean 'timeout'"),
        ("max_token", "did you mean 'max_tokens'"),
    ],
)
def test_a_wrong_name_is_said_with_the_right_ones(name: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        check_options(gradwire.SamplingOptions, {name: 1}, gradwire.TrainingClient.sample)
