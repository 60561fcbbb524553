"""Architectures of ``tools/make_architectures.py`` whose numbers once differed from those of transformers alone."""

from __future__ import annotations

import pytest
from gradwire_losses.registry import load_builtin_losses
from make_architectures import CONFIGURATIONS, check

MENDED = (
    "Phi-3, LongRoPE",  # factors chosen by the longest row of a forward
    "Phi-MoE, LongRoPE",  # and scales, by a forward of its own
    "Phi-MoE",  # a router that draws in training mode and returns a tuple
    "Falcon",  # adds to a layer's product in place
    "OLMo, clipped",
    "Jamba",  # reads the weight of a projection
    "Mamba",  # peft refuses an adapter on one of its layers
)


@pytest.mark.parametrize("name", MENDED)
def test_training_and_samples_have_the_numbers_of_transformers(name: str) -> None:
    load_builtin_losses()
    found = check(name)
    assert not found.wrong and not found.refusal, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in MENDED])
def test_no_architecture_is_wrong_without_a_word(name: str) -> None:
    load_builtin_losses()
    found = check(name)
    assert not found.wrong, found
