"""Estimators that no loss uses by itself, against the sums of their papers. The others are tested with their losses,
and all of them with their numpy twins in ``tests/client/rl/test_advantages.py``."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gradwire_losses.advantages import BLOCK, discounted_sums, gae, vtrace


def plain_targets(
    ratios: list[float], rewards: list[float], values: list[float], gamma: float, rho: float, c: float, end: float
) -> list[float]:
    """v_s = V_s + sum_t gamma^(t-s) (prod_{i<t} c_i) delta_t, written out."""
    following = [*values[1:], end][: len(values)]
    targets = []
    for s in range(len(values)):
        total = values[s]
        for t in range(s, len(values)):
            passed = math.prod(min(c, ratio) for ratio in ratios[s:t])
            delta = min(rho, ratios[t]) * (rewards[t] + gamma * following[t] - values[t])
            total += gamma ** (t - s) * passed * delta
        targets.append(total)
    return targets


def test_vtrace_is_the_sum_of_the_paper(rng: np.random.Generator) -> None:
    lengths = [3, 0, 5, 1]
    ratios, rewards, values = (rng.gamma(2, 0.6, 9), rng.normal(size=9), rng.normal(size=9))
    ends = rng.normal(size=4)
    advantages, targets = vtrace(
        torch.from_numpy(np.log(ratios)),
        torch.zeros(9, dtype=torch.float64),
        torch.from_numpy(rewards),
        torch.from_numpy(values),
        torch.tensor(lengths),
        gamma=0.9,
        rho_clip=1.3,
        c_clip=0.8,
        bootstrap_values=torch.from_numpy(ends),
    )
    expected, expected_advantages, start = [], [], 0
    for length, end in zip(lengths, ends.tolist(), strict=True):
        part = slice(start, start + length)
        own = [array[part].tolist() for array in (ratios, rewards, values)]
        row = plain_targets(*own, 0.9, 1.3, 0.8, end)
        expected += row
        for t in range(length):
            following = row[t + 1] if t + 1 < length else end
            expected_advantages.append(min(1.3, own[0][t]) * (own[1][t] + 0.9 * following - own[2][t]))
        start += length
    np.testing.assert_allclose(targets.numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(advantages.numpy(), expected_advantages, rtol=1e-10)


def test_on_policy_vtrace_has_the_returns_for_targets() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    rewards = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    values = torch.tensor([9.0, -3.0, 0.5], dtype=torch.float64)
    _, targets = vtrace(zeros, zeros, rewards, values, torch.tensor([3]), gamma=0.5)
    torch.testing.assert_close(targets, torch.tensor([3.0, 4.0, 4.0], dtype=torch.float64))


def test_distant_policies_stay_finite() -> None:
    far = torch.tensor([0.0, -900.0])
    advantages, targets = vtrace(far, far.flip(0), torch.ones(2), torch.ones(2), torch.tensor([2]))
    assert torch.isfinite(advantages).all() and torch.isfinite(targets).all()


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99 * 0.95, 1.0])
def test_discounted_sums_of_long_rows_are_those_of_a_loop(factor: float, rng: np.random.Generator) -> None:
    width = int(rng.integers(1, 4)) * BLOCK + int(rng.integers(-1, 2))
    numbers = torch.from_numpy(rng.normal(size=(3, width)))
    expected, following = torch.zeros_like(numbers), torch.zeros(3, dtype=torch.float64)
    for t in range(width - 1, -1, -1):
        following = numbers[:, t] + factor * following
        expected[:, t] = following
    torch.testing.assert_close(discounted_sums(numbers, factor), expected, rtol=1e-10, atol=1e-10)


def test_advantages_of_nothing_are_nothing() -> None:
    empty = torch.zeros(0)
    for lengths in (torch.zeros(0, dtype=torch.long), torch.tensor([0, 0])):
        advantages, returns = gae(empty, empty, lengths, bootstrap_values=torch.ones(len(lengths)))
        assert len(advantages) == len(returns) == 0
