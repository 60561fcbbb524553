"""Offline evaluation against obp 0.4.1, on the Open Bandit logs that its wheel contains (10,000 decisions a file).

Decisions of ZOZOTOWN's site under two logging policies, uniform and Bernoulli Thompson sampling: which of 34 to 80
items was shown at one of three positions, and whether it was clicked. Both get what ours read from the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.router import FeatureSpace, LinearPolicy, LoggedDecision
from gradwire.router.logs import read_log
from gradwire.router.offline import evaluate_offline, fit_rewards, logged_arrays
from gradwire.router.offline_training import feature_space_of, train_offline

obp: Any = pytest.importorskip("obp", reason="obp is not installed: make parity")
ope: Any = pytest.importorskip("obp.ope")

USER = [f"user_feature_{n}" for n in range(4)]
COLUMNS = {"mode": "item_id", "propensity": "propensity_score", "reward": "click"}
CAMPAIGNS = ["all", "men", "women"]


def open_bandit(logger: str, campaign: str) -> list[LoggedDecision]:
    folder = Path(obp.__file__).parent / "dataset" / "obd" / logger / campaign
    return read_log(folder / f"{campaign}.csv", columns=COLUMNS, features=USER)


def some_policy(space: FeatureSpace, modes: list[str], seed: int = 0) -> LinearPolicy:
    rng = np.random.default_rng(seed)
    return LinearPolicy(space, modes, {"policy_weight": 0.3 * rng.normal(size=(len(space), len(modes)))})


@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
@pytest.mark.parametrize("campaign", CAMPAIGNS)
@pytest.mark.parametrize("logger", ["random", "bts"])
def test_estimates_are_obps(logger: str, campaign: str, greedy: bool) -> None:
    log = open_bandit(logger, campaign)
    assert len(log) == 10_000
    policy = some_policy(feature_space_of(log), sorted({each.mode for each in log}))
    data = logged_arrays(log, policy)
    weight, bias = fit_rewards(data.x, data.modes, data.rewards, len(policy.modes))
    report = evaluate_offline(log, policy, greedy=greedy, reward_model=lambda x: x @ weight + bias)

    logprobs = policy.logprobs(data.x)
    target = np.eye(len(policy.modes))[logprobs.argmax(1)] if greedy else np.exp(logprobs)
    theirs: dict[str, Any] = {
        "reward": data.rewards,
        "action": data.modes,
        "pscore": data.propensities,
        "action_dist": target[:, :, None],
        "position": np.zeros(len(log), int),
    }
    clicks = ((target[np.arange(len(log)), data.modes] > 0.01) & (data.rewards > 0)).sum()
    model = {"estimated_rewards_by_reg_model": (data.x @ weight + bias)[:, :, None]}
    for estimate, estimator, extra in (
        (report.ips, ope.InverseProbabilityWeighting(), {}),
        (report.snips, ope.SelfNormalizedInverseProbabilityWeighting(), {}),
        (report.dr, ope.DoublyRobust(), model),
    ):
        assert estimate.value == pytest.approx(estimator.estimate_policy_value(**theirs, **extra), rel=1e-9, abs=1e-12)
        # Theirs are percentiles of resampled means, ours normal: as wide, where there are clicks enough for either. For
        # SNIPS obp resamples w r / mean(w) as if mean(w) were known; ours has the variance of both.
        if estimate is not report.snips and clicks >= 20 and report.effective_sample_size >= 100:
            resampled = estimator.estimate_interval(**theirs, **extra, n_bootstrap_samples=400, random_state=0)
            width = resampled["95.0% CI (upper)"] - resampled["95.0% CI (lower)"]
            assert estimate.high - estimate.low == pytest.approx(width, rel=0.25), estimator
    assert report.logged.value == pytest.approx(np.mean([each.reward for each in log]))


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_the_uniform_policys_clicks_are_foreseen_from_the_other_policys_log(campaign: str) -> None:
    """The one policy whose true value the files tell: the uniform one, which logged the other file."""
    log = open_bandit("bts", campaign)
    uniform = LinearPolicy(feature_space_of(log), sorted({each.mode for each in log}))
    foreseen = evaluate_offline(log, uniform, greedy=False)
    seen = [each.reward for each in open_bandit("random", campaign)]
    error = np.hypot(np.std(seen) / np.sqrt(len(seen)), foreseen.dr.standard_error)
    for estimate in (foreseen.ips, foreseen.snips, foreseen.dr):
        assert estimate.value == pytest.approx(np.mean(seen), abs=3 * max(error, estimate.standard_error))
    # In the women's file a few propensities are below 1e-4: the report says what its figures are worth.
    assert (foreseen.effective_sample_size < 100) == bool(foreseen.warnings) == (campaign == "women")


def test_a_policy_is_learned_from_real_logs() -> None:
    """Clicks are a few in a thousand: what is learned from 5,000 must not look worse than the log on 5,000 others."""
    log = open_bandit("random", "men")
    learned = train_offline(
        log[::2], LinearPolicy(feature_space_of(log), sorted({each.mode for each in log})), steps=100
    )
    report = evaluate_offline(log[1::2], learned, greedy=False)
    print(report)
    assert report.dr.high > report.logged.low and report.effective_sample_size > 100
