"""The estimators in numpy against their torch twins on the server, and against sums written out."""

from __future__ import annotations

from typing import Any

import gradwire_losses.baselines as twins
import numpy as np
import pytest
import torch
from gradwire.rl import baselines

SIZES = np.array([3, 2, 4, 1])


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def agree(name: str, *arguments: Any, **options: Any) -> np.ndarray:
    """The function's result, which is its twin's."""
    found = getattr(baselines, name)(*arguments, **options)
    expected = getattr(twins, name)(*map(tensor, arguments), **{key: tensor(value) for key, value in options.items()})
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-10, atol=1e-12)
    return np.asarray(found)


@pytest.mark.parametrize("scale", [True, False])
def test_pass_k(scale: bool, rng: np.random.Generator) -> None:
    rewards = rng.normal(size=10)
    rewards[[3, 4]] = 0.5  # two that are equal: no lead
    found = agree("pass_k_advantages", rewards, SIZES, scale=scale)
    assert np.count_nonzero(found) == 2 and found[3:5].tolist() == [0.0, 0.0]
    assert baselines.pass_k_advantages([1.0, 4.0, 2.0], [3], scale=False).tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("weights", [None, [2.0, 0.5]])
def test_gdpo(weights: Any, rng: np.random.Generator) -> None:
    rewards, lengths = rng.normal(size=(10, 2)) * [1.0, 100.0], rng.integers(0, 6, 10)
    found = agree("gdpo_advantages", rewards, SIZES, lengths, weights=weights)
    assert found.mean() == pytest.approx(0.0, abs=1e-12) and found.std(ddof=1) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("count", ["spread", "nonzero"])
def test_gpg(count: Any, rng: np.random.Generator) -> None:
    rewards = rng.integers(0, 2, 10).astype(float)
    agree("gpg_advantages", rewards, SIZES, count=count)
    agree("gpg_advantages", np.zeros(10), SIZES, count=count)
    assert baselines.gpg_advantages([1.0, 0.0, 0.0, 0.0], [2, 2]).tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_optimal_token_baseline(zero_tail: bool, by_position: bool, weighted: bool, rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 6, 10)
    tokens = int(lengths.sum())
    logprobs = np.log(rng.uniform(0.05, 0.9, tokens))
    given = [rng.normal(size=tokens), logprobs, 2 * logprobs + rng.uniform(0, 0.1, tokens), lengths, SIZES]
    options: dict[str, Any] = {"zero_tail": zero_tail}
    if by_position:  # some tokens of tools between those of the policy
        options["positions"] = np.concatenate([np.cumsum(rng.integers(1, 3, length)) - 1 for length in lengths])
    if weighted:
        options["weights"] = rng.uniform(0.5, 2.0, tokens)
    found = agree("optimal_token_baseline", *given, **options)
    assert not found[-lengths[-1] :].any()  # a group of one


def test_nothing_gives_nothing() -> None:
    empty = np.zeros(0)
    assert len(baselines.optimal_token_baseline(empty, empty, empty, [], [])) == 0
    assert len(baselines.pass_k_advantages(empty, [])) == 0
