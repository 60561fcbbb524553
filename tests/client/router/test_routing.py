"""The policy in production: one line, a log, and learning from outcomes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.router import FeatureSpace, LinearPolicy, LoggedDecision, RouterPolicy

SPACE = FeatureSpace(("length", "domain=code", "domain=math"))
MODES = ["small", "large", "debate"]
REQUEST = {"length": 0.4, "domain": "math"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    policy = LinearPolicy(SPACE, MODES, {"policy_weight": rng.normal(size=(3, 3)), "value_weight": [1.0, 0.0, 2.0]})
    policy.save(tmp_path / "policy_state.npz")
    return tmp_path / "policy_state.npz"


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_it_routes_in_one_line(file: Path) -> None:
    decision = RouterPolicy.from_file(file).route(REQUEST)
    policy = LinearPolicy.load(file)
    x = policy.features.vector(REQUEST)[None]
    expected = np.exp(policy.logprobs(x)[0])
    assert list(decision.probabilities) == MODES
    assert list(decision.probabilities.values()) == pytest.approx(expected.tolist())
    assert decision.mode == MODES[int(expected.argmax())]
    assert decision.value == pytest.approx(2.4)
    assert decision.propensity == 1.0
    assert RouterPolicy.from_file(file).route([0.4, 0.0, 1.0]) == decision


def test_production_needs_numpy_alone(file: Path) -> None:
    probe = (
        "import sys\nfor name in ('torch', 'pydantic', 'yaml', 'rich', 'gymnasium'): sys.modules[name] = None\n"
        "from gradwire.router import RouterPolicy\n"
        f"print(RouterPolicy.from_file({str(file)!r}).route({REQUEST!r}).mode)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in MODES


def test_a_dry_run_only_records(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs/decisions.jsonl"
    router = RouterPolicy.from_file(file, log=log)
    chosen = router.route(REQUEST)
    assert router.dry_run(REQUEST) is None  # type: ignore[func-returns-value]
    decided, dry = records(log)
    assert (decided["event"], dry["event"]) == ("decision", "dry_run")
    assert dry["mode"] == decided["mode"] == chosen.mode
    assert dry["features"] == REQUEST
    assert (dry["propensity"], dry["reward"]) == (1.0, None)
    assert dry["probabilities"] == chosen.probabilities
    with pytest.raises(ValueError, match="a dry run only records: pass log="):
        RouterPolicy.from_file(file).dry_run(REQUEST)


def test_exploration_is_drawn_with_the_logged_propensities(file: Path, tmp_path: Path) -> None:
    router = RouterPolicy.from_file(file, exploration=0.6, log=tmp_path / "log.jsonl", seed=0)
    decisions = [router.route(REQUEST) for _ in range(4000)]
    propensity = {decision.mode: decision.propensity for decision in decisions}
    assert set(propensity) == set(MODES)
    assert sum(propensity.values()) == pytest.approx(1.0)
    for mode, likely in propensity.items():
        share = sum(decision.mode == mode for decision in decisions) / len(decisions)
        assert share == pytest.approx(likely, abs=4 * np.sqrt(likely * (1 - likely) / 4000))
        policy = decisions[0].probabilities[mode]
        greedy = mode == max(decisions[0].probabilities, key=lambda each: decisions[0].probabilities[each])
        assert likely == pytest.approx(0.4 * greedy + 0.6 * (0.5 * policy + 0.5 / 3))
    assert [each["propensity"] for each in records(tmp_path / "log.jsonl")] == [each.propensity for each in decisions]
    with pytest.raises(ValueError, match="exploration needs a log"):
        RouterPolicy.from_file(file, exploration=0.1)


def test_an_update_follows_the_gradient_and_is_logged(file: Path, tmp_path: Path) -> None:
    import torch

    router = RouterPolicy.from_file(file, log=tmp_path / "log.jsonl", learning_rate=0.3)
    before = router.policy.copy()
    x = torch.tensor(SPACE.vector(REQUEST))
    weight = torch.tensor(before.parameters["policy_weight"], requires_grad=True)
    logprob = torch.log_softmax(x @ weight, 0)[1]
    value = 2.4
    ratio = logprob.exp().item() / 0.25
    (ratio * (1.7 - value) * logprob).backward()
    assert weight.grad is not None
    router.update(REQUEST, "large", 1.7, propensity=0.25)
    rate = 0.3 / (1 + float(x @ x))
    moved = router.policy.parameters["policy_weight"] - before.parameters["policy_weight"]
    assert moved == pytest.approx(rate * weight.grad.numpy(), abs=1e-12)
    assert router.policy.parameters["value_bias"] == pytest.approx(rate * (1.7 - value))
    (outcome,) = records(tmp_path / "log.jsonl")
    assert outcome["event"] == "outcome"
    assert (outcome["mode"], outcome["propensity"], outcome["reward"]) == ("large", 0.25, 1.7)
    assert LoggedDecision(**outcome).features == REQUEST
    with pytest.raises(ValueError, match="no mode 'huge'; this policy has small, large, debate"):
        router.update(REQUEST, "huge", 1.0)
    with pytest.raises(ValueError, match="reward must be a finite number"):
        router.update(REQUEST, "large", float("nan"))
    with pytest.raises(ValueError, match="without exploration 'large' is never chosen here"):
        RouterPolicy(before.copy()).update(REQUEST, "large", 1.0)


def test_online_it_learns_which_mode_is_best_for_what(tmp_path: Path) -> None:
    router = RouterPolicy(LinearPolicy(SPACE, MODES), exploration=0.5, log=tmp_path / "log.jsonl", seed=1)
    rng = np.random.default_rng(0)
    for _ in range(1500):
        domain = "code" if rng.random() < 0.5 else "math"
        request = {"length": float(rng.random()), "domain": domain}
        decision = router.route(request)
        best = "small" if domain == "code" else "debate"
        router.update(request, decision.mode, float(decision.mode == best), propensity=decision.propensity)
    router.save(tmp_path / "learned.npz")
    learned = RouterPolicy.from_file(tmp_path / "learned.npz")
    for length in (0.1, 0.9):
        assert learned.route({"length": length, "domain": "code"}).mode == "small"
        assert learned.route({"length": length, "domain": "math"}).mode == "debate"


def test_a_policy_is_replaced_while_other_threads_route(file: Path, tmp_path: Path) -> None:
    """The two differ in modes and features, so a mixture of them would raise or name a foreign mode."""
    other = tmp_path / "other.npz"
    LinearPolicy(FeatureSpace(("length",)), ["tiny", "huge"], {"policy_weight": [[0.5, -1.0]]}).save(other)
    router = RouterPolicy.from_file(file)
    stopped = threading.Event()

    def serve(_: int) -> set[tuple[str, ...]]:
        seen = set()
        while not stopped.is_set():
            with contextlib.suppress(ValueError):  # the other policy's request
                seen.add(tuple(router.route({"length": 0.4}).probabilities))
            with contextlib.suppress(ValueError):
                seen.add(tuple(router.route(REQUEST).probabilities))
        return seen

    with ThreadPoolExecutor(3) as pool:
        serving = [pool.submit(serve, n) for n in range(3)]
        for _ in range(50):
            router.reload(other)
            assert router.route({"length": 0.4}).mode == "tiny"
            router.reload(file)
            assert router.route(REQUEST).mode in MODES
        stopped.set()
    assert set().union(*(each.result() for each in serving)) <= {tuple(MODES), ("tiny", "huge")}
    (tmp_path / "broken.npz").write_bytes(b"PK")
    for missing in ("broken.npz", "none.npz"):
        with pytest.raises((ValueError, FileNotFoundError)):
            router.reload(tmp_path / missing)
    assert list(router.route(REQUEST).probabilities) == MODES, "the old policy stays"
