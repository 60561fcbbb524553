"""The estimators against worked examples, plain float64 references, and their torch twins on the server."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gradwire_losses.advantages as torch_advantages
import numpy as np
import pytest
import torch
from gradwire.rl import advantages

TWINS = sorted(
    name
    for name in (
        "gae",
        "rewards_to_go",
        "at_last_token",
        "group_spread",
        "group_advantages",
        "whiten",
        "rloo_advantages",
        "opo_advantages",
        "remax_advantages",
        "subgroup_advantages",
        "vtrace",
        "amplify_planning",
    )
    if hasattr(torch_advantages, name)
)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def arguments(name: str, rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    lengths = rng.integers(0, 9, 6)
    tokens = int(lengths.sum())
    rewards, sizes = rng.integers(0, 3, 6).astype(float), np.array([1, 3, 2])
    match name:
        case "gae":
            return [rng.normal(size=tokens), rng.normal(size=tokens), lengths], {"bootstrap_values": rng.normal(size=6)}
        case "rewards_to_go":
            return [rng.normal(size=tokens), lengths], {"gamma": 0.9}
        case "at_last_token":
            return [rewards, lengths], {}
        case "whiten":
            return [rng.normal(size=tokens + 2)], {"shift_mean": bool(rng.integers(2))}
        case "opo_advantages":
            return [rewards, lengths + 1, sizes], {}
        case "subgroup_advantages":
            return [rng.normal(size=8), rng.integers(0, 4, 8)], {"scale": bool(rng.integers(2))}
        case "amplify_planning":
            return [rng.normal(size=9), rng.random(9) < 0.5], {"alpha": 0.3}
        case "remax_advantages":
            return [rewards, rng.normal(size=6)], {}
        case "vtrace":
            return [rng.normal(size=tokens) for _ in range(4)] + [lengths], {"gamma": 0.9}
        case _:
            return [rewards, sizes], {}


@pytest.mark.parametrize("name", TWINS)
def test_twins_agree(name: str, rng: np.random.Generator) -> None:
    args, kwargs = arguments(name, rng)
    tensors = [torch.from_numpy(np.asarray(each)) for each in args]
    options = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
    ours, theirs = getattr(advantages, name)(*args, **kwargs), getattr(torch_advantages, name)(*tensors, **options)
    for mine, other in zip(
        ours if isinstance(ours, tuple) else (ours,), theirs if isinstance(theirs, tuple) else (theirs,)
    ):
        np.testing.assert_allclose(mine, other.numpy(), rtol=1e-9, atol=1e-12)


def test_gae_by_hand() -> None:
    # delta_1 = 1 + 0.5 * 0 - 2 = -1; delta_0 = 0 + 0.5 * 2 - 1 = 0; A_0 = 0 + 0.25 * -1
    result, returns = advantages.gae([0, 1], [1, 2], [2], gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(result, [-0.25, -1])
    np.testing.assert_allclose(returns, [0.75, 1])


def test_truncated_is_not_terminated() -> None:
    ended, _ = advantages.gae([1, 1], [0, 0], [1, 1], gamma=0.5, bootstrap_values=[0, 4])
    np.testing.assert_allclose(ended, [1, 3])


def test_gae_skips_observations_and_their_nans() -> None:
    whole = advantages.gae([1, np.nan, np.nan, 2], [0.5, np.nan, np.nan, 1], [4], mask=[True, False, False, True])
    compact = advantages.gae([1, 2], [0.5, 1], [2])
    for mine, other in zip(whole, compact):
        np.testing.assert_allclose(mine[[0, 3]], other)
        np.testing.assert_array_equal(mine[[1, 2]], 0)


def plain_gae(rewards: Any, values: Any, gamma: float, lam: float, bootstrap: float) -> list[float]:
    out = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            following = values[k + 1] if k + 1 < len(rewards) else bootstrap
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following - values[k])
        out.append(total)
    return out


def test_gae_is_the_sum_of_the_paper(rng: np.random.Generator) -> None:
    lengths = [3, 0, 7, 1]
    rewards, values, ends = rng.normal(size=11), rng.normal(size=11), rng.normal(size=4)
    result, _ = advantages.gae(rewards, values, lengths, gamma=0.9, gae_lambda=0.8, bootstrap_values=ends)
    cuts = np.cumsum(lengths)[:-1]
    rows = zip(np.split(rewards, cuts), np.split(values, cuts), ends)
    np.testing.assert_allclose(result, np.concatenate([plain_gae(r, v, 0.9, 0.8, e) for r, v, e in rows]))


@pytest.mark.parametrize(
    "estimator",
    [
        lambda r: advantages.group_advantages(r, [1, 3]),
        lambda r: advantages.group_advantages(r, [1, 3], scale=False),
        lambda r: advantages.rloo_advantages(r, [1, 3]),
        lambda r: advantages.opo_advantages(r, [2, 5, 1, 1], [1, 3]),
    ],
)
def test_groups_without_spread_give_zero(estimator: Callable[[Any], np.ndarray]) -> None:
    np.testing.assert_array_equal(estimator([0.3, 0.1, 0.1, 0.1]), 0)


def test_group_advantages_by_hand() -> None:
    rewards = [1, 0, 2, 5]
    np.testing.assert_allclose(advantages.group_advantages(rewards, [3, 1], scale=False), [0, -1, 1, 0])
    np.testing.assert_allclose(advantages.group_advantages(rewards, [3, 1]), [0, -1 / 1.0001, 1 / 1.0001, 0])
    np.testing.assert_allclose(advantages.rloo_advantages(rewards, [3, 1]), [0, -1.5, 1.5, 0])
    np.testing.assert_allclose(advantages.remax_advantages(rewards, [1, 1, 0, 6]), [0, -1, 2, -1])


def test_opo_weighs_by_length() -> None:
    # baseline (1 * 3 + 0 * 1) / 4
    np.testing.assert_allclose(advantages.opo_advantages([1, 0], [3, 1], [2]), [0.25, -0.75])


def test_reinforce_plus_plus_normalises_over_all_tokens(rng: np.random.Generator) -> None:
    rewards, lengths = rng.normal(size=10), [4, 6]
    result = advantages.reinforce_plus_plus_advantages(rewards, lengths, gamma=0.9)
    returns = [
        sum(0.9**k * r for k, r in enumerate(row[t:])) for row in np.split(rewards, [4]) for t in range(len(row))
    ]
    np.testing.assert_allclose(result, (returns - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8))
    result = advantages.reinforce_plus_plus_baseline_advantages([1, 0, 3, 3], [2, 2], [1, 2, 1, 1])
    centred = np.array([0.5, -0.5, -0.5, 0, 0])
    np.testing.assert_allclose(result, (centred - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8))


def test_vtrace_on_its_own_samples_is_td_lambda_one(rng: np.random.Generator) -> None:
    logprobs, rewards, values = (rng.normal(size=7) for _ in range(3))
    result, targets = advantages.vtrace(logprobs, logprobs, rewards, values, [4, 3], gamma=0.9)
    gae, returns = advantages.gae(rewards, values, [4, 3], gamma=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(result, gae)
    np.testing.assert_allclose(targets, returns)


def test_vtrace_is_the_sum_of_the_paper(rng: np.random.Generator) -> None:
    policy, behavior, rewards, values = (rng.normal(size=5) for _ in range(4))
    _, targets = advantages.vtrace(
        policy, behavior, rewards, values, [5], gamma=0.9, rho_clip=1.2, c_clip=0.8, bootstrap_values=[0.7]
    )
    rho, c = np.minimum(np.exp(policy - behavior), 1.2), np.minimum(np.exp(policy - behavior), 0.8)
    following = np.append(values[1:], 0.7)
    for s in range(5):
        expected = values[s] + sum(
            0.9 ** (t - s) * np.prod(c[s:t]) * rho[t] * (rewards[t] + 0.9 * following[t] - values[t])
            for t in range(s, 5)
        )
        np.testing.assert_allclose(targets[s], expected)


def test_gigpo_by_hand() -> None:
    """Two episodes of a group pass through the doorway: one reaches the goal from there, the other walks on.

    Episode 0: start -> door -> goal (reward 1). Episode 1: start -> door -> wall (0). gamma 1/2, no scaling.
    A_E = [1/2, -1/2]. Returns: start 1/2, door 1 | start 0, door 0, wall 0.
    A_S: start +-1/4, door +-1/2, wall alone 0. With omega 2: A = A_E + 2 A_S.
    """
    result = advantages.gigpo_advantages(
        [1, 0], [2], [0, 1, 0, 0, 0], [2, 3], ["start", "door", "start", "door", "wall"],
        gamma=0.5, omega=2.0, scale=False,
    )  # fmt: skip
    np.testing.assert_allclose(result, [0.5 + 0.5, 0.5 + 1.0, -0.5 - 0.5, -0.5 - 1.0, -0.5])


def test_gigpo_is_the_formulas_of_the_paper(rng: np.random.Generator) -> None:
    """Episodes of three groups walk among four states; its advantages term by term, as sums over sets."""
    group_sizes, gamma, omega = [4, 1, 5], 0.9, 0.7
    group_of = np.repeat(np.arange(3), group_sizes)
    counts = rng.integers(1, 7, 10)
    scores = rng.integers(0, 2, 10).astype(float)
    rewards = [rng.normal(size=count) for count in counts]
    states = [rng.choice(list("stuv"), count).tolist() for count in counts]

    def normalised(value: float, among: list[float]) -> float:
        spread = np.std(among, ddof=1) if len(among) > 1 else 0.0
        return (value - np.mean(among)) / (spread + 1e-4) if spread else 0.0

    def discounted(episode: int, t: int) -> float:
        return sum(gamma ** (k - t) * rewards[episode][k] for k in range(t, counts[episode]))

    expected = []
    for i in range(10):
        relative = normalised(scores[i], [scores[j] for j in range(10) if group_of[j] == group_of[i]])
        for t in range(counts[i]):
            same = [
                discounted(j, k)
                for j in range(10)
                for k in range(counts[j])
                if group_of[j] == group_of[i] and states[j][k] == states[i][t]
            ]
            expected.append(relative + omega * normalised(discounted(i, t), same))
    result = advantages.gigpo_advantages(
        scores, group_sizes, np.concatenate(rewards), counts, list(itertools.chain(*states)), gamma=gamma, omega=omega
    )
    np.testing.assert_allclose(result, expected, atol=1e-9)


def test_gigpo_anchor_states_do_not_cross_groups() -> None:
    step = advantages.gigpo_step_advantages([1, 0, 5], ["a", "a", "b"], ["s", "s", "s"], scale=False)
    np.testing.assert_allclose(step, [0.5, -0.5, 0])
    assert [members.tolist() for members in advantages.gigpo_step_groups("aab", "sts")] == [[0], [1], [2]]


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 3 but there are 2"):
        advantages.gae([1, 2], [0, 0], [3])
