"""The field's measures of routers, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire.router import FeatureSpace, LinearPolicy
from gradwire.router.evaluation import HeldOut, calls_to_reach, nearest_neighbours, recovered_by_calls
from gradwire.router.world import World


@pytest.fixture(scope="module")
def held_out() -> HeldOut:
    return HeldOut(World(), [1, 2], 400)


def constant(mode: str) -> LinearPolicy:
    """Always one mode."""
    world = World()
    return LinearPolicy(world.features, world.modes, {"policy_bias": [5.0 * (name == mode) for name in world.modes]})


def test_pgr_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    weak, strong, scores = rng.random(50), rng.random(50) + 0.3, rng.random(50)
    curve = recovered_by_calls(weak, strong, scores)
    order = np.argsort(-scores)
    for calls in (0, 1, 20, 50):
        answered = weak.copy()
        answered[order[:calls]] = strong[order[:calls]]
        assert curve[calls] == pytest.approx((answered.mean() - weak.mean()) / (strong.mean() - weak.mean()))
    calls = calls_to_reach(curve, 0.5) * 50
    assert curve[round(calls)] >= 0.5 > curve[round(calls) - 1]


def test_a_report_knows_its_bounds(held_out: HeldOut) -> None:
    report = held_out.report(constant("debate"))
    policy, single, oracle, random, _ = report.routers
    rewards = held_out.tables["reward"]
    assert policy.reward == pytest.approx(rewards[:, World().modes.index("debate")].mean())
    assert single.reward == pytest.approx(rewards.mean(0).max())
    assert oracle.reward == pytest.approx(rewards.max(1).mean())
    assert random.reward == pytest.approx(rewards.mean())
    assert (single.recovered, oracle.recovered) == (0.0, pytest.approx(1.0))
    assert oracle.apgr is not None
    assert all(router.apgr is None or router.apgr <= oracle.apgr for router in report.routers)
    assert report.shares["debate"] == 1.0
    assert np.mean(report.reward_by_seed) == pytest.approx(policy.reward)


def test_neighbours_are_the_nearest(held_out: HeldOut) -> None:
    x = held_out.x[:700]
    assert nearest_neighbours(World(), x)[650] == pytest.approx(nearest_neighbours(World(), x[650:651])[0])


def test_held_out_requests_are_those_of_their_seeds(held_out: HeldOut) -> None:
    again = HeldOut(World(), [2], 400)
    assert (again.x == held_out.x[400:]).all()
    assert not (again.x == World().draw(np.random.default_rng(2), 400)).all()


def test_a_policy_of_another_world_is_refused(held_out: HeldOut) -> None:
    with pytest.raises(ValueError, match="other features or modes"):
        held_out.mean_reward(LinearPolicy(FeatureSpace(("a",)), ["b"]))
