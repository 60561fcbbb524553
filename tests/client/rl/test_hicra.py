"""Credit of planners: the numbers, the settings and their names, the figures that are recorded."""

from __future__ import annotations

import math
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
import torch
import yaml
from gradwire.loop.loggers import read_jsonl
from gradwire.rl import HICRACreditAssigner, JsonlLogger, PrometheusLogger, build_hicra_from_dict

REWARDS = [[1.0, 2.0, 9.0], [0.5, -3.0, 4.0], [2.0, 0.0, 0.0], [1.0, -1.0, 7.0]]
MASK = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]
NAMES = ("hicra_planner_reward_ratio", "hicra_depth", "hicra_success_total")


def sample(name: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(name) or 0.0


def test_credits_are_torchs_in_float64() -> None:
    rewards, mask = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(MASK, dtype=torch.bool)
    chosen = rewards[mask]
    expected = torch.zeros_like(rewards)
    expected[mask] = 1.5 * (chosen - chosen.mean()) / torch.sqrt(chosen.var(unbiased=False) + 1e-3)
    assigner = HICRACreditAssigner(multiplier=1.5, normalization_eps=1e-3)
    credits = assigner(rewards, mask)
    np.testing.assert_allclose(credits, expected.numpy(), rtol=1e-13)
    np.testing.assert_array_equal(assigner.assign(REWARDS, MASK), credits)


def test_normalised_credits_have_mean_0_and_variance_1_inside_the_mask() -> None:
    rng = np.random.default_rng(0)
    rewards, mask = rng.normal(3, 7, (20, 6)), rng.random((20, 6)) < 0.6
    credits = HICRACreditAssigner()(rewards, mask)
    assert credits[mask].mean() == pytest.approx(0, abs=1e-12) and credits[mask].var() == pytest.approx(1, rel=1e-8)
    assert not credits[~mask].any()


def test_without_normalising_rewards_are_scaled_and_what_is_masked_is_zero() -> None:
    credits = HICRACreditAssigner(multiplier=2.0, normalize=False)(REWARDS, MASK)
    np.testing.assert_array_equal(credits, 2 * np.array(REWARDS) * np.array(MASK))
    np.testing.assert_array_equal(HICRACreditAssigner(normalize=False)(REWARDS), REWARDS)


@pytest.mark.parametrize("rewards", [[[0.1] * 3] * 7, [[0.3]], [[0.0, 0.0]]])
def test_equal_rewards_give_zeros_exactly(rewards: list[list[float]]) -> None:
    assert not HICRACreditAssigner()(rewards).any()


def test_padding_is_never_read() -> None:
    spoiled = [[1.0, 2.0, math.nan], [0.5, -3.0, 4.0], [2.0, math.inf, math.nan], [1.0, -1.0, -math.inf]]
    np.testing.assert_array_equal(HICRACreditAssigner()(spoiled, MASK), HICRACreditAssigner()(REWARDS, MASK))


def test_disabled_it_gives_zeros_and_records_nothing(tmp_path: Path) -> None:
    before = [sample(name) for name in NAMES]
    logger = JsonlLogger(tmp_path / "hicra.jsonl")
    assigner = HICRACreditAssigner(enabled=False, logger=logger)
    assert assigner(REWARDS, MASK).tolist() == np.zeros((4, 3)).tolist()
    assert [sample(name) for name in NAMES] == before
    assert assigner.metrics == {} and not logger.path.exists()


def test_the_figures_are_those_of_the_raw_rewards(tmp_path: Path) -> None:
    logger, before = JsonlLogger(tmp_path / "hicra.jsonl"), sample("hicra_success_total")
    assigner = HICRACreditAssigner(multiplier=-3.0, logger=logger)
    assigner(REWARDS, MASK)
    # 1/3; 0.5/1.5; 2/2; a total of 0 gives 0
    expected = {"hicra_planner_reward_ratio": (1 / 3 + 1 / 3 + 1) / 4, "hicra_depth": 2.0, "hicra_success_total": 3.0}
    assert assigner.metrics == pytest.approx(expected)
    assert sample("hicra_planner_reward_ratio") == pytest.approx(expected["hicra_planner_reward_ratio"])
    assert sample("hicra_depth") == 2.0
    assert sample("hicra_success_total") - before == 3.0
    HICRACreditAssigner()([[1.0]])  # another one in the program counts into the same counter
    assigner([[-1.0, 0.0], [0.25, 0.5]], [[True, False], [True, True]])
    assert sample("hicra_success_total") - before == 5.0
    lines = read_jsonl(logger.path)
    assert [line["iteration"] for line in lines] == [0, 1]
    assert [line["hicra_success_total"] for line in lines] == [3.0, 4.0]
    assert (lines[1]["hicra_planner_reward_ratio"], lines[1]["hicra_depth"]) == (pytest.approx((1 + 1 / 3) / 2), 1.5)


def test_a_total_of_0_but_for_rounding_is_0() -> None:
    assigner = HICRACreditAssigner()
    assigner([[0.1, 0.2, -0.3]])
    assert assigner.metrics == {"hicra_planner_reward_ratio": 0.0, "hicra_depth": 3.0, "hicra_success_total": 0.0}


def test_an_empty_batch_and_an_episode_without_steps() -> None:
    assigner = HICRACreditAssigner()
    assert assigner(np.zeros((0, 3))).shape == (0, 3) and assigner.metrics == {}
    assert assigner(np.zeros((2, 0))).shape == (2, 0)
    assert assigner.metrics == {"hicra_planner_reward_ratio": 0.0, "hicra_depth": 0.0, "hicra_success_total": 0.0}
    assert not assigner([[1.0, 2.0]], [[0, 0]]).any()


def test_it_works_where_prometheus_client_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assigner = HICRACreditAssigner()
    assert assigner(REWARDS, MASK).any() and set(assigner.metrics) == set(NAMES)


@pytest.mark.parametrize(
    ("rewards", "mask", "message"),
    [
        ([1.0, 2.0], None, r"\[episodes, steps\], got \[2\]"),
        ([[1.0, 2.0], [1.0]], None, "padded to one length"),
        ([[1.0, 2.0]], [[1]], r"mask has the shape \[1, 1\] but rewards have \[1, 2\]"),
        ([[1.0, 2.0]], [[1, 2]], "true or false"),
        ([[1.0, 2.0], [3.0, math.nan]], [[1, 0], [1, 1]], "episode 1, step 1: nan is not a finite number"),
    ],
)
def test_a_wrong_batch_is_refused(rewards: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HICRACreditAssigner()(rewards, mask)


@pytest.mark.parametrize(
    "config",
    [
        {"enabled": True, "multiplier": 2.0, "normalize": False, "normalization_eps": 1e-4},
        {"hicra": {"enabled": True, "planner_weight": 2, "normalize": False, "eps": 1e-4}},
        {"trainer": {"rate": 1, "hicra": {"planner_weight": 2.0, "multiplier": 2, "normalize": False, "eps": 1e-4}}},
        {"hicra": {"planner_weight": 2.0, "normalize": False, "epsilon": 1e-4, "eps": 1e-4, "multiplier": None}},
    ],
)
def test_one_assigner_by_its_several_names(config: dict[str, Any]) -> None:
    expected = HICRACreditAssigner(enabled=True, multiplier=2.0, normalize=False, normalization_eps=1e-4)
    assert repr(build_hicra_from_dict(config)) == repr(expected)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"planner_weight": 2.0, "multiplier": 3.0}, ValueError, "multiplier is 3.0 and planner_weight is 2.0"),
        ({"a": {"hicra": {"eps": 1e-3, "epsilon": 1e-4}}}, ValueError, "a.hicra.epsilon is 0.0001 and a.hicra.eps is"),
        ({"hicra": {"weight": 1}}, ValueError, "hicra.weight: no such setting; the settings are enabled, multiplier"),
        ({"hicra": {}, "a": {"hicra": {}}}, ValueError, "two blocks of HICRA's settings: hicra, a.hicra"),
        ({"hicra": {"enabled": "false"}}, TypeError, "hicra.enabled must be true or false, got 'false'"),
        ({"hicra": {"planner_weight": True}}, TypeError, "hicra.planner_weight must be a number, got True"),
        ({"hicra": {"eps": 0}}, ValueError, "hicra.eps must be greater than 0"),
        ({"multiplier": math.inf}, ValueError, "multiplier must be finite"),
        ({"hicra": True}, TypeError, "hicra must be a dictionary of settings, got True"),
        ([1], TypeError, "must be a dictionary"),
    ],
)
def test_a_wrong_configuration_names_its_place(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_hicra_from_dict(config)


def test_the_shipped_configuration_is_the_default(request: pytest.FixtureRequest) -> None:
    shipped = yaml.safe_load((request.config.rootpath / "configs/training/hicra.yaml").read_text())
    assert repr(build_hicra_from_dict(shipped)) == repr(HICRACreditAssigner()) == repr(build_hicra_from_dict(None))


def test_prometheus_is_a_logger_like_the_others() -> None:
    registry = prometheus_client.CollectorRegistry()
    taken = prometheus_client.Gauge("hicra_depth", "Another part's.", registry=registry)
    taken.set(7)
    log = PrometheusLogger(0, registry=registry)
    assert log._server is not None
    log.log(3, {"val/reward mean": 0.5, "hicra_depth": 2.0, "2nd": 4.0})
    PrometheusLogger(registry=registry).log(4, {"val/reward mean": 0.75})
    with urllib.request.urlopen(f"http://127.0.0.1:{log._server[0].server_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    log.close()
    log.close()
    assert {line for line in lines if not line.startswith("#")} == {
        "iteration 4.0",
        "val_reward_mean 0.75",
        "hicra_depth 7.0",
        "_2nd 4.0",
    }


def test_the_router_offers_it_too() -> None:
    from gradwire import router
    from gradwire.rl import hicra

    assert router.build_hicra_from_dict is hicra.build_hicra_from_dict
    assert all(hasattr(router, name) for name in router.__all__)
