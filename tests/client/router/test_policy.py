"""The linear policy and its features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gradwire.router import FeatureSpace, LinearPolicy, RouterPolicy

SPACE = FeatureSpace(("length", "domain=code", "domain=math", "step"), ("step",))


def some_policy() -> LinearPolicy:
    rng = np.random.default_rng(0)
    return LinearPolicy(
        SPACE,
        ["small", "large", "debate"],
        {"policy_weight": rng.normal(size=(4, 3)), "value_weight": rng.normal(size=4), "value_bias": 0.5},
    )


def test_features_by_name_and_in_order_are_the_same() -> None:
    assert SPACE.vector({"length": 0.3, "domain": "math"}).tolist() == [0.3, 0.0, 1.0, 0.0]
    assert SPACE.vector({"length": 0.3, "domain=code": 1, "step": 0.5}).tolist() == [0.3, 1.0, 0.0, 0.5]
    assert SPACE.vector([0.3, 0.0, 1.0]).tolist() == [0.3, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ({"length": 0.3}, "missing: domain"),
        ({"length": 0.3, "domain": "law"}, "'domain' is 'law'; it can be one of code, math"),
        ({"length": 0.3, "domain": "math", "mood": 1}, "no feature 'mood'"),
        ({"length": "long", "domain": "math"}, "'length' is 'long', which is not a number"),
        ({"length": float("nan"), "domain": "math"}, "'length' is nan"),
        ([1.0, 2.0], "takes 3 numbers: length, domain=code, domain=math"),
        ([1.0, np.inf, 0.0], "'domain=code' is inf; features must be finite numbers up to 1e\\+30"),
        ([1.0, 0.0, np.nan], "is nan"),
        ([1e200, 0.0, 0.0], "is 1e\\+200"),
    ],
)
def test_wrong_features_are_named(features: object, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        SPACE.vector(features)  # type: ignore[arg-type]


def test_probabilities_are_a_softmax_and_illegal_modes_have_none() -> None:
    policy, x = some_policy(), np.random.default_rng(1).normal(size=(5, 4))
    logits = x @ policy.parameters["policy_weight"]
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.exp(policy.logprobs(x)) == pytest.approx(expected, abs=1e-14)
    legal = np.array([[True, False, True]] * 5)
    probabilities = np.exp(policy.logprobs(x, legal))
    assert (probabilities[:, 1] == 0).all()
    assert probabilities.sum(1) == pytest.approx(np.ones(5))
    assert set(policy.act(x, np.random.default_rng(0), legal)[0]) <= {0, 2}


def test_samples_have_the_policys_frequencies() -> None:
    policy = some_policy()
    x = np.repeat(np.random.default_rng(2).normal(size=(1, 4)), 40_000, axis=0)
    modes, logprobs = policy.act(x, np.random.default_rng(3))
    probabilities = np.exp(policy.logprobs(x[:1])[0])
    assert np.bincount(modes, minlength=3) / len(x) == pytest.approx(probabilities, abs=0.01)
    assert logprobs == pytest.approx(np.log(probabilities)[modes])
    assert (policy.act(x)[0] == probabilities.argmax()).all()


def test_a_file_gives_the_policy_back_and_is_the_same_each_time(tmp_path: Path) -> None:
    policy = some_policy()
    policy.save(tmp_path / "a.npz")
    LinearPolicy.load(tmp_path / "a.npz").save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    loaded = LinearPolicy.load(tmp_path / "b.npz")
    assert (loaded.modes, loaded.features) == (policy.modes, policy.features)
    assert all((loaded.parameters[name] == array).all() for name, array in policy.parameters.items())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_files_that_are_no_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no policy at"):
        LinearPolicy.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("weights")
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", feature_names=np.array([{}], dtype=object))
    for name in ("text", "other", "pickled"):
        with pytest.raises(ValueError, match=r"is not a policy written by LinearPolicy\.save"):
            LinearPolicy.load(tmp_path / f"{name}.npz")


def test_interactions_are_the_products_of_two_features_of_a_request(tmp_path: Path) -> None:
    space = FeatureSpace(("length", "load", "domain=code", "domain=math", "step"), ("step",)).with_interactions()
    assert space.columns[5:] == (
        "length x length",
        "length x load",
        "length x domain=code",
        "length x domain=math",
        "load x load",
        "load x domain=code",
        "load x domain=math",
    )
    vector = space.vector({"length": 0.5, "load": 0.2, "domain": "math"})
    expanded = space.expand(vector)
    assert expanded.tolist() == pytest.approx([0.5, 0.2, 0, 1, 0, 0.25, 0.1, 0, 0.5, 0.04, 0, 0.2])
    assert (space.expand(expanded) == expanded).all()

    weight = np.random.default_rng(4).normal(size=(12, 2))
    policy = LinearPolicy(space, ("small", "large"), {"policy_weight": weight, "value_weight": weight[:, 0]})
    assert policy.logits(vector[None])[0] == pytest.approx(expanded @ weight)
    assert policy.values(vector[None]) == pytest.approx(expanded @ weight[:, :1])
    policy.save(tmp_path / "policy.npz")
    loaded = LinearPolicy.load(tmp_path / "policy.npz")
    assert loaded.features == space
    decision = RouterPolicy(loaded).route({"length": 0.5, "load": 0.2, "domain": "math"})
    assert list(decision.probabilities.values()) == pytest.approx(np.exp(policy.logprobs(vector[None])[0]).tolist())


def test_a_product_of_what_no_request_has_is_refused() -> None:
    with pytest.raises(ValueError, match="the product length x step needs 'step'"):
        FeatureSpace(("length", "step"), ("step",), (("length", "step"),))
