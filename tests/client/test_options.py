"""Keyword arguments that a function does not have are named, with those that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gradwire
import pytest
from gradwire.losses import LossCatalogue
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


@pytest.mark.parametrize(("called", "meant"), [("sft", "causal_lm"), ("NLL", "causal_lm"), ("rm", "reward_modeling")])
def test_a_loss_is_found_by_what_others_call_it(called: str, meant: str) -> None:
    catalogue: Any = LossCatalogue()
    catalogue.update(SimpleNamespace(name=name) for name in ("causal_lm", "reward_modeling", "sdft", "orpo"))
    with pytest.raises(gradwire.UnknownLossError, match=f"did you mean '{meant}'"):
        catalogue.get(called)
