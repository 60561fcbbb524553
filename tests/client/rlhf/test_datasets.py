"""Ratings and prompts: what is taken, normalisation, and splits that keep a prompt on one side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gradwire import InvalidArgumentError
from gradwire.rlhf import Feedback, FeedbackDataset, PPODataset
from hypothesis import given
from hypothesis import strategies as st

RATINGS = st.lists(
    st.builds(
        Feedback,
        st.sampled_from([f"question {n}" for n in range(8)]),
        st.sampled_from(["yes", "no", ""]),
        st.floats(0, 1, width=32),
    ),
    min_size=1,
    max_size=40,
)


def test_mappings_and_objects_are_taken_and_the_rest_of_them_is_not_looked_at() -> None:
    row = {"prompt": "why?", "response": "so", "score": 1, "runId": "r", "notes": None}
    assert list(FeedbackDataset([row, SimpleNamespace(**row)])) == [Feedback("why?", "so", 1.0)] * 2


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"score": 1.2}, "score", "from 0 to 1"),
        ({"score": "0.5"}, "score", "from 0 to 1"),
        ({"score": True}, "score", "from 0 to 1"),
        ({"score": float("nan")}, "score", "from 0 to 1"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"response": None}, "response", "a text"),
    ],
)
def test_a_rating_that_is_none_is_named(change: dict[str, Any], field: str, said: str) -> None:
    good = {"prompt": "why?", "response": "so", "score": 0.5}
    with pytest.raises(InvalidArgumentError, match=r"feedbacks\[1\].*" + field) as caught:
        FeedbackDataset([good, good | change])
    assert caught.value.field == field
    assert said in str(caught.value)


def test_a_missing_field_and_an_empty_list_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"feedbacks\[0\] has no score"):
        FeedbackDataset([{"prompt": "why?", "response": "so"}])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        FeedbackDataset([])


@given(RATINGS)
def test_normalised_scores_have_mean_0_and_deviation_1(ratings: list[Feedback]) -> None:
    data = FeedbackDataset(ratings)
    scores = np.array([item.score for item in ratings], np.float64)
    np.testing.assert_array_equal(data.scores, scores)
    np.testing.assert_allclose(data.normalized_scores * data.std + data.mean, scores, atol=1e-12)
    if scores.std() > 1e-6:
        assert abs(data.normalized_scores.mean()) < 1e-6
        assert abs(data.normalized_scores.std() - 1) < 1e-6


def test_equal_scores_normalise_to_zeros() -> None:
    data = FeedbackDataset([Feedback("a", "b", 0.5), Feedback("c", "d", 0.5)])
    assert data.std == 1
    assert data.normalized_scores.tolist() == [0, 0]


@given(RATINGS, st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_loses_nothing_and_keeps_each_prompt_on_one_side(
    ratings: list[Feedback], fraction: float, seed: int
) -> None:
    data = FeedbackDataset(ratings)
    train, val = data.split(fraction, seed)
    sides = [train, *([val] if val is not None else [])]
    assert sorted(map(str, (item for side in sides for item in side))) == sorted(map(str, ratings))
    prompts = [set(side.prompts) for side in sides]
    assert not set.intersection(*prompts) if len(prompts) == 2 else True
    assert (val is None) == (fraction == 0 or len(data.prompts) == 1)
    assert all((side.mean, side.std) == (train.mean, train.std) for side in sides)


def test_a_split_depends_on_the_seed_and_not_on_the_order() -> None:
    ratings = [Feedback(f"question {n}", "yes", n / 40) for n in range(40)]
    held_out = [set(FeedbackDataset(order).split(0.25, 1)[1].prompts) for order in (ratings, ratings[::-1])]  # type: ignore[union-attr]
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 10
    other = FeedbackDataset(ratings).split(0.25, 2)[1]
    assert other is not None and set(other.prompts) != held_out[0]
    prompts = PPODataset(ratings).split(0.25, 1)[1]
    assert prompts is not None and set(prompts) == held_out[0]


@pytest.mark.parametrize("fraction", [-0.1, 1, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidArgumentError, match="validation_fraction"):
        PPODataset(["a", "b"]).split(fraction)


def test_prompts_are_there_once_and_each_epoch_has_them_all() -> None:
    data = PPODataset([Feedback("a", "x", 0), Feedback("b", "y", 1), Feedback("a", "z", 1)])
    assert list(data) == ["a", "b"]
    data = PPODataset([f"prompt {n}" for n in range(6)])
    batches = data.batches(4, seed=3)
    first = [next(batches) for _ in range(3)]
    again = data.batches(4, seed=3)
    assert first == [next(again) for _ in range(3)]
    seen = [prompt for batch in first for prompt in batch]
    assert sorted(seen[:6]) == sorted(seen[6:]) == sorted(data)


def test_prompts_that_are_no_texts_are_refused() -> None:
    for prompts in ([], [""], [{"question": "a"}]):
        with pytest.raises(InvalidArgumentError):
            PPODataset(prompts)


def test_torch_s_loader_batches_ratings_and_prompts() -> None:
    loading = pytest.importorskip("torch.utils.data")
    data = FeedbackDataset([Feedback(f"question {n}", "yes", n / 4) for n in range(4)])
    batches = list(loading.DataLoader(data, batch_size=3))
    assert [batch.score.tolist() for batch in batches] == [[0.0, 0.25, 0.5], [0.75]]
    assert list(batches[1].prompt) == ["question 3"]
    assert list(loading.DataLoader(PPODataset(data), batch_size=4)) == [[f"question {n}" for n in range(4)]]
