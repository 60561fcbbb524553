"""Advantages of groups against their papers' sums, written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.baselines import (
    gdpo_advantages,
    gpg_advantages,
    optimal_token_baseline,
    pass_k_advantages,
)

SIZES = torch.tensor([3, 2, 4, 1])
GROUPS = np.split(np.arange(10), np.cumsum(SIZES.numpy())[:-1])


def std(values: Any) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def test_pass_k_is_the_lead_of_the_best(rng: np.random.Generator) -> None:
    rewards = rng.normal(size=10)
    rewards[[3, 4]] = 0.5  # two that are equal
    for scale in (True, False):
        expected = np.zeros(10)
        for group in GROUPS:
            if len(group) > 1:
                order = group[np.argsort(-rewards[group], kind="stable")]
                lead = rewards[order[0]] - rewards[order[1]]
                expected[order[0]] = lead / (std(rewards[group]) + 1e-4) if scale else lead
        found = pass_k_advantages(torch.from_numpy(rewards), SIZES, scale=scale)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("weights", [None, [2.0, 0.5]])
def test_gdpo_normalises_each_reward_in_its_group(weights: Any, rng: np.random.Generator) -> None:
    rewards, lengths = rng.normal(size=(10, 2)) * [1.0, 100.0], rng.integers(1, 6, 10)
    each = np.zeros((10, 2))
    for group in GROUPS:
        for k in range(2):
            if len(group) > 1:
                own = rewards[group, k]
                each[group, k] = (own - own.mean()) / (std(own) + 1e-4)
    total = np.repeat(each @ np.array(weights or [1.0, 1.0]), lengths)
    expected = (total - total.mean()) / math.sqrt(std(total) ** 2 + 1e-8)
    found = gdpo_advantages(torch.from_numpy(rewards), SIZES, torch.from_numpy(lengths), weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_gpg_makes_up_for_responses_without_gradient(rng: np.random.Generator) -> None:
    rewards = rng.normal(size=10)
    rewards[[3, 4]], rewards[6] = 0.5, 0.0
    centred = np.zeros(10)
    for group in GROUPS:
        if len(set(rewards[group])) > 1:
            centred[group] = rewards[group] - rewards[group].mean()
    given = torch.from_numpy(rewards)
    np.testing.assert_allclose(gpg_advantages(given, SIZES), centred * 10 / 7, rtol=1e-12)
    np.testing.assert_allclose(gpg_advantages(given, SIZES, count="nonzero"), centred * 10 / 9, rtol=1e-12)


def plain_baseline(rows: list[dict[str, list[float]]], places: list[list[int]], zero_tail: bool) -> list[list[float]]:
    """Of one group, response by response."""
    returns = [[math.fsum(row["rewards"][t:]) for t in range(len(row["rewards"]))] for row in rows]
    energy = []
    for row in rows:
        summands = [1 - 2 * math.exp(lp) + math.exp(c) for lp, c in zip(row["logprobs"], row["collision"], strict=True)]
        summands = [s * w * w for s, w in zip(summands, row["weights"], strict=True)]
        energy.append([math.fsum(summands[: t + 1]) for t in range(len(summands))])
    second = sorted(map(len, returns))[-2] if len(rows) > 1 else 0
    found = []
    for i, own in enumerate(places):
        found.append([])
        for t, place in enumerate(own):
            there = [(j, p.index(place)) for j, p in enumerate(places) if place in p]
            total = math.fsum(energy[j][u] for j, u in there) + 1e-8
            baseline = math.fsum(returns[j][u] * energy[j][u] for j, u in there) / total
            baseline = 0.0 if zero_tail and place >= second else baseline
            found[-1].append(0.0 if len(rows) == 1 else returns[i][t] - baseline)
    return found


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("holes", [False, True], ids=["consecutive", "with-positions"])
def test_the_optimal_token_baseline_is_the_weighted_mean(
    holes: bool, zero_tail: bool, rng: np.random.Generator
) -> None:
    lengths = rng.integers(1, 7, 10)
    places = [np.sort(rng.choice(9, n, replace=False)) if holes else np.arange(n) for n in lengths]
    rows = [
        {
            "rewards": rng.normal(size=n).tolist(),
            "logprobs": (-rng.gamma(2.0, 0.7, n)).tolist(),
            "collision": (-rng.gamma(2.0, 0.5, n)).tolist(),
            "weights": rng.uniform(0.5, 1.5, n).tolist(),
        }
        for n in lengths
    ]
    expected = [
        entry
        for group in GROUPS
        for own in plain_baseline([rows[i] for i in group], [places[i].tolist() for i in group], zero_tail)
        for entry in own
    ]
    flat = {name: torch.tensor([x for row in rows for x in row[name]], dtype=torch.float64) for name in rows[0]}
    found = optimal_token_baseline(
        flat["rewards"],
        flat["logprobs"],
        flat["collision"],
        torch.from_numpy(lengths),
        SIZES,
        positions=torch.from_numpy(np.concatenate(places)) if holes else None,
        zero_tail=zero_tail,
        weights=flat["weights"],
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
