"""The estimators against their torch twins on the server, whose own tests run on both; GiGPO against its paper."""

from __future__ import annotations

from typing import Any

import gradwire_losses.advantages as torch_advantages
import numpy as np
import pytest
import torch
from gradwire.rl import advantages
from gradwire.rl.algorithms import gigpo_credit
from gradwire.rl.types import Action, StepData, Task, Trajectory

TWINS = [
    "gae",
    "rewards_to_go",
    "group_spread",
    "group_advantages",
    "whiten",
    "rloo_advantages",
    "subgroup_advantages",
    "amplify_planning",
]


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
        case "whiten":
            return [rng.normal(size=tokens + 2)], {"shift_mean": bool(rng.integers(2))}
        case "subgroup_advantages":
            return [rng.normal(size=8), rng.integers(0, 4, 8)], {"scale": bool(rng.integers(2))}
        case "amplify_planning":
            return [rng.normal(size=9), rng.random(9) < 0.5], {"alpha": 0.3}
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


def steps_of(states: list[str], rewards: Any) -> list[StepData]:
    none = np.zeros(0, np.int64)
    return [
        StepData(t, state, state, none, Action(""), none, none.astype(np.float32), reward=float(reward))
        for t, (state, reward) in enumerate(zip(states, rewards, strict=True))
    ]


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
    trajectories = [
        Trajectory(Task(""), int(group_of[i]), i, steps=steps_of(states[i], rewards[i]), reward=scores[i])
        for i in range(10)
    ]
    credit = gigpo_credit(trajectories, gamma=gamma, omega=omega)
    np.testing.assert_allclose(credit.advantages, expected, atol=1e-9)


def test_gigpo_anchor_states_do_not_cross_groups() -> None:
    assert [members.tolist() for members in advantages.gigpo_step_groups("aab", "sts")] == [[0], [1], [2]]


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 3 but there are 2"):
        advantages.gae([1, 2], [0, 0], [3])
