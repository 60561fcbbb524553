"""The estimators, in torch for the server and in numpy for the client, by one set of tests.

Each is held to its paper's sum, written out in plain Python, or to numbers worked out by hand.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import gradwire_losses.advantages as in_torch
import numpy as np
import pytest
import torch
from gradwire.rl import advantages as in_numpy
from gradwire_losses.advantages import BLOCK, discounted_sums

IN_BOTH = [
    "gae",
    "rewards_to_go",
    "group_spread",
    "group_advantages",
    "subgroup_advantages",
    "whiten",
    "rloo_advantages",
    "amplify_planning",
]


class Estimators:
    """Those of one library, called with lists and giving numpy arrays."""

    def __init__(self, library: str) -> None:
        self._module = {"torch": in_torch, "numpy": in_numpy}[library]
        self._torch = library == "torch"

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {key: self._own(value) for key, value in kwargs.items()}
            found = getattr(self._module, name)(*map(self._own, args), **given)
            several = found if isinstance(found, tuple) else (found,)
            arrays = tuple(each.numpy() if self._torch else each for each in several)
            return arrays if isinstance(found, tuple) else arrays[0]

        return call

    def _own(self, value: Any) -> Any:
        if isinstance(value, (bool, float, int)):
            return value
        array = np.asarray(value)
        return torch.from_numpy(array) if self._torch else array


@pytest.fixture(params=["torch", "numpy"])
def estimators(request: pytest.FixtureRequest) -> Any:
    return Estimators(request.param)


@pytest.fixture
def on_the_server() -> Any:
    """Of torch alone: the client does not need them."""
    return Estimators("torch")


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_each_is_there_in_both_with_the_same_arguments() -> None:
    for name in IN_BOTH:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (in_torch, in_numpy))
        assert list(ours) == list(theirs), name
        assert all(ours[p].default == theirs[p].default for p in ours if p != "alpha"), name  # the loss always gives it


# ------------------------------------------------------------------ with values


def plain_gae(rewards: Any, values: Any, gamma: float, lam: float, end: float) -> list[float]:
    following = [*values[1:], end][: len(values)]
    errors = [r + gamma * v1 - v for r, v1, v in zip(rewards, following, values, strict=True)]
    return [math.fsum((gamma * lam) ** (u - t) * errors[u] for u in range(t, len(errors))) for t in range(len(errors))]


def test_gae_is_the_sum_of_the_paper(estimators: Any, rng: np.random.Generator) -> None:
    lengths = [3, 0, int(rng.integers(1, 300)), 1]
    rewards, values = rng.normal(size=(2, sum(lengths)))
    ends, cuts = rng.normal(size=4), np.cumsum(lengths)[:-1]
    advantages, returns = estimators.gae(rewards, values, lengths, gamma=0.9, gae_lambda=0.8, bootstrap_values=ends)
    rows = zip(np.split(rewards, cuts), np.split(values, cuts), ends, strict=True)
    close(advantages, [a for r, v, end in rows for a in plain_gae(r.tolist(), v.tolist(), 0.9, 0.8, end)])
    close(returns, advantages + values)


def test_a_truncated_end_has_a_value_and_a_terminated_one_has_none(estimators: Any) -> None:
    rewards, values, lengths = [1.0, 1.0], [0.0, 0.0], [1, 1]
    close(estimators.gae(rewards, values, lengths, gamma=0.5)[0], [1.0, 1.0])
    close(estimators.gae(rewards, values, lengths, gamma=0.5, bootstrap_values=[0.0, 4.0])[0], [1.0, 3.0])


def test_what_the_policy_did_not_write_is_passed_over_by_gae(estimators: Any) -> None:
    """Time does not pass at an observation, whatever stands there: its NaNs reach nothing."""
    nan = math.nan
    ends = [0.5, 0.25]
    masked = estimators.gae(
        [1.0, nan, nan, 2.0, 3.0],
        [0.5, nan, nan, 1.0, 4.0],
        [4, 1],
        mask=[True, False, False, True, True],
        bootstrap_values=ends,
    )
    compact = estimators.gae([1.0, 2.0, 3.0], [0.5, 1.0, 4.0], [2, 1], bootstrap_values=ends)
    for found, expected in zip(masked, compact, strict=True):
        close(found[[0, 3, 4]], expected)
        close(found[[1, 2]], [0.0, 0.0])


# ------------------------------------------------------------------ with groups


@pytest.mark.parametrize("scale", [True, False])
def test_groups_are_centred_and_if_asked_scaled(estimators: Any, scale: bool, rng: np.random.Generator) -> None:
    rewards, sizes = rng.normal(size=9), [3, 1, 5]
    expected = []
    for group in np.split(rewards, [3, 4]):
        std = group.std(ddof=1) if len(group) > 1 else 0.0
        expected += ((group - group.mean()) / (std + 1e-4 if scale else 1.0)).tolist()
    close(estimators.group_advantages(rewards, sizes, scale=scale), expected)


def test_leaving_one_out_is_less_the_mean_of_the_others(estimators: Any) -> None:
    close(estimators.rloo_advantages([1.0, 0.0, 2.0, 5.0], [3, 1]), [0.0, -1.5, 1.5, 0.0])


def test_opo_weighs_by_length(on_the_server: Any) -> None:
    """The baseline is (1 * 3 + 0 * 1) / 4."""
    close(on_the_server.opo_advantages([1.0, 0.0], [3, 1], [2]), [0.25, -0.75])


@pytest.mark.parametrize("name", ["group", "group_unscaled", "rloo"])
def test_equal_rewards_give_exactly_zero_and_are_counted(estimators: Any, name: str) -> None:
    """0.1 three times has a mean that is not 0.1 in floating point: the advantage is 0 all the same."""
    rewards, sizes = [0.3, 0.1, 0.1, 0.1, 0.7, 0.7], [1, 3, 2]
    found = {
        "group": lambda: estimators.group_advantages(rewards, sizes),
        "group_unscaled": lambda: estimators.group_advantages(rewards, sizes, scale=False),
        "rloo": lambda: estimators.rloo_advantages(rewards, sizes),
    }[name]()
    np.testing.assert_array_equal(found, np.zeros(6))
    mean, std, differ = estimators.group_spread([*rewards, 0.0, 1.0], [*sizes, 2])
    assert differ.tolist() == [False, False, False, True]
    np.testing.assert_array_equal(std[:3], 0.0)
    close(mean, [0.3, 0.1, 0.7, 0.5])


def test_rewards_to_go_and_whitening(estimators: Any, rng: np.random.Generator) -> None:
    rewards, lengths = rng.normal(size=10), [4, 6]
    to_go = [
        math.fsum(0.9**k * r for k, r in enumerate(row[t:])) for row in np.split(rewards, [4]) for t in range(len(row))
    ]
    close(estimators.rewards_to_go(rewards, lengths, 0.9), to_go)
    close(estimators.whiten(to_go), (to_go - np.mean(to_go)) / np.sqrt(np.var(to_go, ddof=1) + 1e-8))


def test_gpgs_scale_counts_responses_with_a_gradient() -> None:
    rewards, sizes = torch.tensor([1.0, 3.0, 0.5, 0.5, 0.0]), torch.tensor([2, 2, 1])
    assert in_torch.gpg_scale(rewards, sizes).item() == 5 / 2
    assert in_torch.gpg_scale(rewards, sizes, count="nonzero").item() == 5 / 4


def test_whitening_keeps_a_mean_if_asked(estimators: Any, rng: np.random.Generator) -> None:
    values = rng.normal(3.0, 2.0, 12)
    kept = estimators.whiten(values, shift_mean=False)
    close([kept.mean(), kept.var(ddof=1)], [values.mean(), values.var(ddof=1) / (values.var(ddof=1) + 1e-8)])
    close(estimators.whiten(values), kept - values.mean())


# ------------------------------------------------------------------ with steps


def test_gigpo_by_hand(on_the_server: Any) -> None:
    """Two episodes of a group pass through the doorway: one reaches the goal from there, the other walks on.

    Episode 0: start -> door -> goal (reward 1). Episode 1: start -> door -> wall (0). gamma 1/2, no scaling.
    A_E = [1/2, -1/2]. Returns: start 1/2, door 1 | start 0, door 0, wall 0.
    A_S: start +-1/4, door +-1/2, wall alone 0. With omega 2: A = A_E + 2 A_S.
    """
    start, door, wall = 7, 8, 9
    found = on_the_server.gigpo_advantages(
        [1.0, 0.0], [2], [0.0, 1.0, 0.0, 0.0, 0.0], [2, 3], [start, door, start, door, wall],
        gamma=0.5, omega=2.0, scale=False,
    )  # fmt: skip
    close(found, [0.5 + 0.5, 0.5 + 1.0, -0.5 - 0.5, -0.5 - 1.0, -0.5])


def test_gigpo_compares_no_states_of_different_tasks(on_the_server: Any) -> None:
    """Two tasks of two episodes of one step, all in a state of the same number."""
    rewards = [1.0, 0.0, 5.0, 2.0]
    found = on_the_server.gigpo_advantages(rewards, [2, 2], rewards, [1] * 4, [3] * 4, omega=1.0, scale=False)
    close(found, [1.0, -1.0, 3.0, -3.0])


def test_gigpo_scales_both_levels(on_the_server: Any) -> None:
    found = on_the_server.gigpo_advantages([1.0, 0.0], [2], [3.0, 0.0], [1, 1], [0, 0], omega=0.5)
    level = [0.5 / (math.sqrt(0.5) + 1e-4), 1.5 / (math.sqrt(4.5) + 1e-4)]
    close(found, [level[0] + 0.5 * level[1], -level[0] - 0.5 * level[1]])


def test_groups_by_key_need_not_be_neighbours(estimators: Any) -> None:
    close(estimators.subgroup_advantages([1.0, 5.0, 3.0, 9.0], [4, 1, 4, 1], scale=False), [-1.0, -2.0, 1.0, 2.0])


# ------------------------------------------------------------------ at the edges


def test_advantages_of_nothing_are_nothing(estimators: Any) -> None:
    empty, no_groups = np.zeros(0), np.zeros(0, dtype=np.int64)
    for lengths in (no_groups, np.array([0, 0])):
        for found in estimators.gae(empty, empty, lengths, bootstrap_values=np.ones(len(lengths))):
            assert len(found) == 0
    for name in ("group_advantages", "rloo_advantages"):
        assert len(getattr(estimators, name)(empty, no_groups)) == 0
    assert len(estimators.whiten(empty)) == 0


def test_a_number_for_the_last_token_of_rows_that_have_one(on_the_server: Any) -> None:
    close(on_the_server.at_last_token([1.0, 2.0, 3.0], [2, 0, 1]), [0.0, 1.0, 3.0])


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99 * 0.95, 1.0])
def test_discounted_sums_of_long_rows_are_those_of_a_loop(factor: float, rng: np.random.Generator) -> None:
    width = int(rng.integers(1, 4)) * BLOCK + int(rng.integers(-1, 2))
    numbers = torch.from_numpy(rng.normal(size=(3, width)))
    expected, following = torch.zeros_like(numbers), torch.zeros(3, dtype=torch.float64)
    for t in range(width - 1, -1, -1):
        following = numbers[:, t] + factor * following
        expected[:, t] = following
    torch.testing.assert_close(discounted_sums(numbers, factor), expected, rtol=1e-10, atol=1e-10)


def test_advantages_of_rewards_that_differ_little() -> None:
    """In float32, a mean of rewards 1e-7 apart is rounded by as much as the deviation that divides them."""
    rewards, sizes = torch.tensor([0.69037879, 0.69037867, 0.69037890, -3.0, 0.1, 0.1, 0.1]), torch.tensor([3, 1, 3])
    assert len(set(rewards[:3].tolist())) == 3
    found = in_torch.group_advantages(rewards, sizes)
    expected = in_torch.group_advantages(rewards.double(), sizes)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)
    assert found[2] > found[0] > found[1] and not found[3:].any()


# ------------------------------------------------------------------ of the client alone


def test_optimal_values_are_log_means_of_exponentials() -> None:
    found = in_numpy.optimal_values([0.0, 1.0, 1.0, 700.0], [3, 1], beta1=0.5)
    close(found, [0.5 * math.log((1 + 2 * math.exp(2)) / 3), 700.0])


def test_pf_ppo_draws_the_rows_whose_rewards_are_sure() -> None:
    rewards = [-2.0, 0.1, 0.0, 2.0, 1.0]
    close(in_numpy.filtration_weights(rewards), np.array([4.0, 0.01, 0.0, 4.0, 1.0]) + 1e-8)
    close(in_numpy.filtration_weights(rewards, method="max_min"), np.array([1.0, 0, 0, 1.0, 0]) + 1e-8)
    close(in_numpy.filtration_weights(rewards, method="max_random"), np.array([0.1, 0.1, 0.1, 0.4, 0.1]) + 1e-8)
    drawn = in_numpy.filtered_rows(rewards * 200, seed=3)
    shares = np.bincount(drawn % 5, minlength=5) / 1000
    np.testing.assert_allclose(shares, np.array([4.0, 0.01, 0.0, 4.0, 1.0]) / 9.01, atol=0.05)
    assert (drawn == in_numpy.filtered_rows(rewards * 200, seed=3)).all()
