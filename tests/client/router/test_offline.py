"""Logged decisions: reading them, judging a policy on them, learning from them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from gradwire.router import FeatureSpace, LinearPolicy, LoggedDecision, RouterPolicy, commands
from gradwire.router.logs import LogError, read_log
from gradwire.router.offline import cross_fitted, evaluate_offline, fit_rewards, logged_arrays
from gradwire.router.offline_training import feature_space_of, train_offline

MODES = ("small", "large", "debate")
SPACE = FeatureSpace(("difficulty", "domain=code", "domain=math"))
WEIGHT = np.array([[-2.0, 0.5, 1.5], [0.5, 1.0, -1.0], [-1.0, 0.0, 1.0]])


def expected_rewards(x: np.ndarray) -> np.ndarray:
    """``[N, M]``: the law that the logs below are drawn from."""
    return np.array([1.0, 0.5, -0.5]) + x @ np.array([[-1.5, 0.2, 1.2], [0.0, 0.4, 0.0], [0.0, 0.0, 0.6]])


def requests(rng: np.random.Generator, count: int) -> np.ndarray:
    """``[count, 3]``: difficulty uniform, domains half and half."""
    domain = rng.integers(2, size=count)
    return np.stack([rng.random(count), domain == 0, domain == 1], axis=1)


def logged(rng: np.random.Generator, count: int, noise: float = 0.3) -> list[LoggedDecision]:
    """Decisions of a policy that prefers what is cheap, with its true propensities."""
    x = requests(rng, count)
    hard = (x[:, 0] >= 0.5)[:, None]
    probabilities = np.where(hard, [[0.3, 0.3, 0.4]], [[0.6, 0.25, 0.15]])
    chosen = (probabilities.cumsum(1) < rng.random((count, 1))).sum(1)
    rewards = expected_rewards(x)[np.arange(count), chosen] + noise * rng.normal(size=count)
    return [
        LoggedDecision(
            {"difficulty": float(row[0]), "domain": "code" if row[1] else "math"}, MODES[mode], float(p[mode]), r
        )
        for row, mode, p, r in zip(x, chosen.tolist(), probabilities, rewards.tolist())
    ]


def policy(seed: int = 0) -> LinearPolicy:
    return LinearPolicy(SPACE, MODES, {"policy_weight": WEIGHT + np.random.default_rng(seed).normal(size=(3, 3))})


def true_value(target: LinearPolicy, greedy: bool, count: int = 200_000) -> float:
    x = requests(np.random.default_rng(99), count)
    probabilities = np.eye(3)[target.logprobs(x).argmax(1)] if greedy else np.exp(target.logprobs(x))
    return float((probabilities * expected_rewards(x)).sum(1).mean())


# ---------------------------------------------------------------- estimators


@pytest.mark.parametrize("greedy", [True, False])
def test_estimates_are_those_of_the_formulas(greedy: bool) -> None:
    """Each decision by itself, in plain Python."""
    log, target = logged(np.random.default_rng(1), 40), policy()
    report = evaluate_offline(log, target, greedy=greedy, reward_model=expected_rewards, confidence=0.9)
    weights, rounds, agreements = [], [], []
    for each in log:
        x = SPACE.vector(each.features)
        logits = (x @ target.parameters["policy_weight"]).tolist()
        total = math.fsum(map(math.exp, logits))
        pi = [math.exp(logit) / total for logit in logits]
        if greedy:
            pi = [float(p == max(pi)) for p in pi]
        taken, q = MODES.index(each.mode), expected_rewards(x).tolist()
        assert each.reward is not None
        weights.append(pi[taken] / each.propensity)
        agreements.append(pi[taken])
        rounds.append(math.fsum(p * e for p, e in zip(pi, q)) + weights[-1] * (each.reward - q[taken]))
    rewards = [float(each.reward or 0) for each in log]
    weighted = [w * r for w, r in zip(weights, rewards)]
    snips = math.fsum(weighted) / math.fsum(weights)
    residuals = [w * (r - snips) / (math.fsum(weights) / 40) for w, r in zip(weights, rewards)]
    z = NormalDist().inv_cdf(0.95)
    for estimate, value, each_round in (
        (report.logged, math.fsum(rewards) / 40, rewards),
        (report.ips, math.fsum(weighted) / 40, weighted),
        (report.snips, snips, residuals),
        (report.dr, math.fsum(rounds) / 40, rounds),
    ):
        mean = math.fsum(each_round) / 40
        error = math.sqrt(math.fsum((r - mean) ** 2 for r in each_round) / 39 / 40)
        assert estimate.value == pytest.approx(value, rel=1e-12)
        assert estimate.standard_error == pytest.approx(error, rel=1e-12)
        assert (estimate.low, estimate.high) == pytest.approx((value - z * error, value + z * error), rel=1e-12)
    squares = math.fsum(w * w for w in weights)
    assert report.effective_sample_size == pytest.approx(math.fsum(weights) ** 2 / squares)
    assert report.max_weight == pytest.approx(max(weights))
    assert report.agreement == pytest.approx(math.fsum(agreements) / 40)


@pytest.mark.parametrize("greedy", [True, False])
def test_intervals_hold_the_truth_as_often_as_they_say(greedy: bool) -> None:
    target = policy()
    truth, covered = true_value(target, greedy), dict.fromkeys(("ips", "snips", "dr"), 0)
    for seed in range(120):
        report = evaluate_offline(logged(np.random.default_rng(seed), 250), target, greedy=greedy)
        for name in covered:
            estimate = getattr(report, name)
            covered[name] += estimate.low <= truth <= estimate.high
    # Of 120 with a probability of 0.95, fewer than 105 would be three standard deviations off.
    assert all(count >= 105 for count in covered.values()), covered


def test_doubly_robust_is_right_where_propensities_are_wrong_or_the_model_is() -> None:
    target, rng = policy(), np.random.default_rng(3)
    log = logged(rng, 6000)
    truth = true_value(target, True)
    wrong_model = evaluate_offline(log, target, reward_model=lambda x: np.full((len(x), 3), 3.0))
    assert wrong_model.dr.value == pytest.approx(truth, abs=4 * wrong_model.dr.standard_error)
    misjudged = [LoggedDecision(each.features, each.mode, 0.5, each.reward) for each in log]
    wrong_propensities = evaluate_offline(misjudged, target)
    assert wrong_propensities.dr.value == pytest.approx(truth, abs=0.03)
    assert abs(wrong_propensities.ips.value - truth) > 0.1


def test_the_default_model_never_sees_the_reward_it_judges() -> None:
    log, target = logged(np.random.default_rng(4), 60), policy()
    data = logged_arrays(log, target)
    before = cross_fitted(data, 3)
    data.rewards[7] += 1000.0
    after = cross_fitted(data, 3)
    np.testing.assert_array_equal(before[7 % 5 :: 5], after[7 % 5 :: 5])
    assert (before != after).any()


def test_the_ridge_regression_is_the_normal_equations() -> None:
    rng = np.random.default_rng(5)
    x, modes, rewards = rng.normal(2, 3, (50, 3)), rng.integers(0, 2, 50), rng.normal(size=50)
    weight, bias = fit_rewards(x, modes, rewards, 3, ridge=0.7)
    for mode in (0, 1):
        own = modes == mode
        # The penalty is on features of variance 1 (over all rows); the bias has none.
        design = np.column_stack([(x[own] - x.mean(0)) / x.std(0), np.ones(own.sum())])
        solved = np.linalg.solve(design.T @ design + np.diag([0.7] * 3 + [0.0]), design.T @ rewards[own])
        predicted = (x - x.mean(0)) / x.std(0) @ solved[:3] + solved[3]
        np.testing.assert_allclose(x @ weight[:, mode] + bias[mode], predicted, rtol=1e-9)
    assert not weight[:, 2].any() and bias[2] == pytest.approx(rewards.mean())


def test_what_makes_figures_doubtful_is_said() -> None:
    log = [LoggedDecision({"difficulty": 0.5, "domain": "code"}, "small", 1.0, 1.0) for _ in range(3)]
    log += [LoggedDecision({"difficulty": 0.5, "domain": "code"}, "retired", 1.0, 1.0)]
    log += [LoggedDecision({"difficulty": 0.5, "domain": "code"}, "small", 1.0, None, "decision")]
    report = evaluate_offline(log, LinearPolicy(SPACE, MODES, {"policy_bias": [0.0, 0.0, 1.0]}))
    assert (report.decisions, report.skipped, report.effective_sample_size) == (4, 1, 0.0)
    assert math.isnan(report.snips.value)
    for text in (
        "every propensity is 1",
        "takes debate on 100.0% of requests, and the log never does",
        "1 decisions took a mode that the policy does not have",
        "effective sample size is 0",
    ):
        assert any(text in warning for warning in report.warnings), text
        assert text in str(report)
    assert json.loads(json.dumps(report.to_json()))["warnings"] == list(report.warnings)


def test_a_log_without_rewards_is_refused(tmp_path: Path) -> None:
    log = [LoggedDecision({"difficulty": 0.5, "domain": "code"}, "small", 0.5, None, "decision")]
    with pytest.raises(ValueError, match="none of the log's 1 decisions has a reward"):
        evaluate_offline(log, policy())
    with pytest.raises(ValueError, match="decision 1: features are missing: domain"):
        evaluate_offline([LoggedDecision({"difficulty": 0.5}, "small", 0.5, 1.0)], policy())
    with pytest.raises(ValueError, match="confidence"):
        evaluate_offline(log, policy(), confidence=95)


# ---------------------------------------------------------------- files


def write_csv(path: Path, log: Sequence[LoggedDecision]) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["difficulty", "domain", "mode", "propensity", "reward", "event"])
        for each in log:
            reward = "" if each.reward is None else each.reward
            rows.writerow([*each.features.values(), each.mode, each.propensity, reward, each.event])
    return path


def test_json_lines_and_csv_give_what_the_decisions_give(tmp_path: Path) -> None:
    log = logged(np.random.default_rng(6), 50)
    log.append(LoggedDecision({"difficulty": 0.5, "domain": "code"}, "small", 0.5, None, "decision"))
    lines = tmp_path / "log.jsonl"
    lines.write_text("".join(json.dumps(each.to_json()) + "\n" for each in log) + "\n")
    table = write_csv(tmp_path / "log.csv", log)
    assert read_log(lines) == read_log(table) == log
    policy().save(tmp_path / "policy.npz")
    reports = [evaluate_offline(source, tmp_path / "policy.npz") for source in (lines, str(table), log)]
    assert reports[0] == reports[1] == reports[2] and reports[0].skipped == 1


def test_a_table_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(",item,p,click,user,note\n0,3,0.25,1,abc,x\n1,4,0.5,0,def,\n")
    columns = {"mode": "item", "propensity": "p", "reward": "click"}
    assert read_log(tmp_path / "log.csv", columns=columns, features=["user"]) == [
        LoggedDecision({"user": "abc"}, "3", 0.25, 1.0),
        LoggedDecision({"user": "def"}, "4", 0.5, 0.0),
    ]
    assert set(read_log(tmp_path / "log.csv", columns=columns)[0].features) == {"user", "note"}


GOOD = '{"features": {"a": 1}, "mode": "m", "propensity": 0.5, "reward": 1}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", GOOD + "{", r"x\.jsonl, line 2: not a JSON object"),
        ("x.jsonl", "[1]", "line 1: a decision must be a JSON object, got"),
        ("x.jsonl", '{"mode": "m"}', "line 1: features must be an object"),
        ("x.jsonl", GOOD.replace("1}", "[1]}", 1), r"the feature 'a' is \[1\]"),
        ("x.jsonl", GOOD.replace('"m"', "3"), "mode is 3; it must be the name"),
        ("x.jsonl", GOOD.replace("0.5", "0"), "propensity is 0.0; it must be above 0"),
        ("x.jsonl", GOOD.replace('"reward": 1', '"reward": "much"'), "reward is 'much'; it must be a finite number"),
        ("x.jsonl", GOOD.replace('"reward": 1', '"reward": NaN'), "reward is nan"),
        ("x.jsonl", GOOD.replace('"mode"', '"event": "guess", "mode"'), "event is 'guess'; it must be one of decision"),
        ("x.csv", "mode,propensity\nm,0.5\n", "there is no column reward; the columns are mode, propensity"),
        ("x.csv", "mode,propensity,reward\nm,0.5\n", "line 2: 2 entries but the header has 3"),
        ("x.csv", "mode,propensity,reward\n\nm,1.5,0\n", "line 3: propensity is 1.5"),
        ("x.csv", "mode,propensity,reward\n,0.5,0\n", "line 2: mode is None"),
    ],
)
def test_a_line_that_is_no_decision_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LogError, match=message):
        read_log(tmp_path / name)


@pytest.mark.parametrize(
    ("propensity", "reward", "message"),
    [
        (0.0, 1.0, "decision 2: propensity is 0.0; it must be above 0 and at most 1"),
        (1.5, 1.0, "decision 2: propensity is 1.5"),
        (math.nan, 1.0, "decision 2: propensity is nan"),
        (0.5, math.nan, "decision 2: reward is nan; it must be a finite number"),
    ],
)
def test_decisions_in_memory_are_checked_as_a_file_is(propensity: float, reward: float, message: str) -> None:
    good, *_ = log = logged(np.random.default_rng(0), 3)
    log[1] = LoggedDecision(good.features, good.mode, propensity, reward)
    for use in (lambda: evaluate_offline(log, policy()), lambda: train_offline(log)):
        with pytest.raises(LogError, match=message):
            use()


def test_columns_are_about_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read as JSON Lines"):
        read_log(tmp_path / "x.jsonl", features=["a"])
    with pytest.raises(ValueError, match="unknown names click; the names are event"):
        read_log(write_csv(tmp_path / "x.csv", []), columns={"click": "reward"})


# ---------------------------------------------------------------- with a router and its command


def test_a_routers_own_log_judges_and_teaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Route with exploration, report outcomes, evaluate by the command, learn offline."""
    log, rng = tmp_path / "decisions.jsonl", np.random.default_rng(12)
    router = RouterPolicy(LinearPolicy(SPACE, MODES), exploration=0.5, log=log, learning_rate=1e-9, seed=0)
    for row in requests(rng, 800):
        features = {"difficulty": float(row[0]), "domain": "code" if row[1] else "math"}
        decision = router.route(features)
        reward = float(expected_rewards(row)[MODES.index(decision.mode)])
        router.update(features, decision.mode, reward, propensity=decision.propensity)
    learned = train_offline(log)
    learned.save(tmp_path / "policy_state.npz")
    settings = tmp_path / "rllm.yaml"
    settings.write_text("rllm:\n  enabled: false\n")
    arguments = ["evaluate", "--config", settings, "--policy", tmp_path / "policy_state.npz", "--log", log]
    commands.main([str(each) for each in arguments])
    shown = capsys.readouterr().out
    report = evaluate_offline(log, learned)
    assert shown == f"{report}\n"
    assert (report.decisions, report.skipped) == (800, 800)
    assert report.dr.low > report.logged.high
    log.write_text("nothing\n")
    with pytest.raises(SystemExit, match=r"decisions\.jsonl, line 1: not a JSON object"):
        commands.main([str(each) for each in arguments])


# ---------------------------------------------------------------- training


def test_a_policy_learned_from_a_log_is_near_the_best_there_is() -> None:
    log = logged(np.random.default_rng(7), 3000)
    learned = train_offline(log)
    assert learned.modes == tuple(sorted(MODES))
    assert learned.features.names == ("difficulty", "domain=code", "domain=math")
    report = evaluate_offline(logged(np.random.default_rng(8), 3000), learned)
    x = requests(np.random.default_rng(9), 20_000)
    law = expected_rewards(x)[:, [MODES.index(mode) for mode in learned.modes]]
    best, single = law.max(1).mean(), law.mean(0).max()
    earned = law[np.arange(len(x)), learned.act(x)[0]].mean()
    assert (earned - single) / (best - single) > 0.95
    assert report.dr.low > report.logged.high
    np.testing.assert_allclose(learned.values(x).mean(), (np.exp(learned.logprobs(x)) * law).sum(1).mean(), atol=0.05)


def test_the_gradient_is_that_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's autograd in float64, on the objective as its documentation states it."""
    import torch
    from gradwire.router import offline_training

    log, start = logged(np.random.default_rng(10), 30), policy()
    seen: list[dict[str, np.ndarray]] = []
    monkeypatch.setattr(offline_training.Adam, "step", lambda self, gradients: seen.append(gradients) or 0.0)
    unchanged = train_offline(log, start, steps=1, entropy_coef=0.3, max_weight=2.0)
    np.testing.assert_allclose(unchanged.parameters["policy_weight"], start.parameters["policy_weight"], rtol=1e-9)
    data = logged_arrays(log, start)
    scores = cross_fitted(data, 3)
    for row, (mode, p, r) in enumerate(zip(data.modes, data.propensities, data.rewards)):
        scores[row, mode] += min(1 / p, 2.0) * (r - scores[row, mode])
    mean, scale = data.x.mean(0), data.x.std(0)
    x = torch.from_numpy((data.x - mean) / scale)
    weight = torch.from_numpy(start.parameters["policy_weight"] * scale[:, None]).requires_grad_()
    bias = torch.from_numpy(start.parameters["policy_bias"] + mean @ start.parameters["policy_weight"]).requires_grad_()
    logprobs = torch.log_softmax(x @ weight + bias, dim=1)
    pi = logprobs.exp()
    objective = (pi * torch.from_numpy(scores) / data.rewards.std()).sum(1) - 0.3 * (pi * logprobs).sum(1)
    (-objective.mean()).backward()
    np.testing.assert_allclose(seen[0]["policy_weight"], weight.grad, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(seen[0]["policy_bias"], bias.grad, rtol=1e-9, atol=1e-12)


def test_training_goes_on_from_a_policy_and_leaves_it_as_it_is() -> None:
    log, start = logged(np.random.default_rng(11), 500), policy()
    before = {name: values.copy() for name, values in start.parameters.items()}
    better = train_offline(log, start, steps=200)
    assert all((start.parameters[name] == values).all() for name, values in before.items())
    assert better.features == start.features and better.modes == start.modes
    assert true_value(better, False, 20_000) > true_value(start, False, 20_000)
    again = train_offline(log, start, steps=200)
    assert all((again.parameters[name] == better.parameters[name]).all() for name in before)


def test_features_of_a_log() -> None:
    log = [LoggedDecision({"b": 2.0, "a": "y"}, "m", 1.0, 0.0), LoggedDecision({"a": "x", "b": 1.0}, "m", 1.0, 0.0)]
    assert feature_space_of(log).names == ("b", "a=x", "a=y")
    with pytest.raises(ValueError, match="decision 2 and the first differ in the features b"):
        feature_space_of([log[0], LoggedDecision({"a": "x"}, "m", 1.0, 0.0)])
    with pytest.raises(ValueError, match="empty"):
        train_offline([])
