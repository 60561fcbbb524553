"""Reward models and classifiers against plain references, and what their labels must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradwire_losses.batch import BatchError
from gradwire_losses.registry import get_loss
from support import reward_references as plain
from support.loss_properties import PROPERTIES
from support.losses import NUM_CLASSES, Case, Columns, group_columns, per_row, read, row_columns


def scored_rows(rng: np.random.Generator, *, weights: bool = False) -> Columns:
    ids = row_columns(rng)["input_ids"]
    columns: Columns = {"input_ids": ids, "scores": [float(np.float32(x)) for x in rng.uniform(1, 5, len(ids))]}
    return columns | ({"weights": [abs(w) for w in per_row(rng, len(ids))]} if weights else {})


def rankings(rng: np.random.Generator, *, ranks: bool = False) -> Columns:
    columns = group_columns(rng)
    columns = {name: columns[name] for name in ("prompt_ids", "response_ids")}
    if ranks:
        columns["ranks"] = [[float(r) for r in rng.permutation(len(group))] for group in columns["response_ids"]]
    return columns


def steps(rng: np.random.Generator, *, soft: bool = False) -> Columns:
    ids = row_columns(rng)["input_ids"]
    draw = (lambda: float(np.float32(rng.random()))) if soft else (lambda: float(rng.integers(0, 2)))
    labels = [[draw() if rng.random() < 0.5 else -100.0 for _ in row] for row in ids]
    labels[2] = [-100.0] * len(ids[2])
    labels[1] = [1.0]
    return {"input_ids": ids, "step_labels": labels}


def classes(rng: np.random.Generator, *, weights: bool = False) -> Columns:
    ids = row_columns(rng)["input_ids"]
    columns: Columns = {"input_ids": ids, "label": [int(c) for c in rng.integers(0, NUM_CLASSES, len(ids))]}
    return columns | ({"weights": [abs(w) for w in per_row(rng, len(ids))]} if weights else {})


def token_classes(rng: np.random.Generator) -> Columns:
    ids = row_columns(rng)["input_ids"]
    labels = [[int(rng.integers(0, NUM_CLASSES)) if rng.random() < 0.6 else -100 for _ in row] for row in ids]
    labels[2] = [-100] * len(ids[2])
    return {"input_ids": ids, "token_labels": labels}


def case(loss: str, build: Any, reference: Any, label: str = "", **kwargs: Any) -> Case:
    return Case(loss, build, kwargs, reference, label)


CASES = [
    case("score_regression", scored_rows, plain.score_regression),
    case("score_regression", scored_rows, plain.score_regression, "range", score_min=1.0, score_max=5.0),
    case(
        "score_regression",
        lambda r: scored_rows(r, weights=True),
        plain.score_regression,
        "standardised",
        score_mean=3.0,
        score_std=1.2,
        loss_type="huber",
        huber_delta=0.7,
    ),
    case("reward_regression", scored_rows, plain.reward_regression),
    case(
        "reward_regression",
        lambda r: scored_rows(r, weights=True),
        plain.reward_regression,
        "standardised",
        score_mean=3.0,
        score_std=1.2,
    ),
    case("plackett_luce", rankings, plain.plackett_luce),
    case("plackett_luce", lambda r: rankings(r, ranks=True), plain.plackett_luce, "ranks", temperature=0.5),
    case("plackett_luce", lambda r: rankings(r, ranks=True), plain.plackett_luce, "top", top_k=2),
    case("process_reward", steps, plain.process_reward),
    case("process_reward", lambda r: steps(r, soft=True), plain.process_reward, "soft"),
    case("process_reward", steps, plain.process_reward, "rows", reduction="sequence_mean"),
    case("process_reward", steps, plain.process_reward, "fixed", reduction="fixed", reduction_divisor=3.0),
    case("sequence_classification", classes, plain.sequence_classification),
    case(
        "sequence_classification",
        lambda r: classes(r, weights=True),
        plain.sequence_classification,
        "smoothed",
        label_smoothing=0.1,
    ),
    case("token_classification", token_classes, plain.token_classification),
    case("token_classification", token_classes, plain.token_classification, "smoothed", label_smoothing=0.2),
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    if check.__name__ == "ignores_what_is_not_scored" and case.loss in ("process_reward", "token_classification"):
        return  # there the labels themselves say what is scored
    check(case, rng)


ROWS = {"input_ids": [[1, 2, 3], [4, 5]]}


@pytest.mark.parametrize(
    ("loss", "columns", "kwargs", "field", "row", "rule"),
    [
        ("score_regression", ROWS | {"scores": [2.0, 7.0]}, {"score_min": 1, "score_max": 5}, "scores", 1,
         "1 <= score <= 5"),
        ("process_reward", ROWS | {"step_labels": [[-100, 1, 0], [-100, 2]]}, {}, "step_labels", 1,
         "0 <= label <= 1, or -100"),
        ("process_reward", ROWS | {"step_labels": [[1, 0], [-100, 1]]}, {}, "step_labels", 0,
         "one entry per token of input_ids"),
        ("sequence_classification", ROWS | {"label": [0, 4]}, {}, "label", 1, "0 <= class < 4"),
        ("token_classification", ROWS | {"token_labels": [[0, 1, -100], [9, 1]]}, {}, "token_labels", 1,
         "0 <= class < 4"),
        ("plackett_luce", {"prompt_ids": [[1], [2]], "response_ids": [[[3], [4]], [[5], [6]]],
                           "ranks": [[0.0, 1.0], [2.0, 2.0]]}, {}, "ranks", 1, "ranks differ in a group"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_are_told_by_row(
    loss: str, columns: Columns, kwargs: dict[str, Any], field: str, row: int, rule: str, rng: np.random.Generator
) -> None:
    with pytest.raises(BatchError) as caught:
        case(loss, lambda _: columns, None, **kwargs).draw(rng).output()
    assert (caught.value.field, caught.value.row, caught.value.rule) == (field, row, rule)


@pytest.mark.parametrize(
    "kwargs",
    [{"score_min": 1}, {"score_std": 1}, {"score_min": 2, "score_max": 1},
     {"score_min": 0, "score_max": 1, "score_mean": 0, "score_std": 1}],
)  # fmt: skip
def test_a_normalisation_that_is_half_given_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="score"):
        get_loss("score_regression").config(**kwargs)


def test_a_label_is_about_its_own_token_even_the_first() -> None:
    batch = read("token_classification", ROWS | {"token_labels": [[3, -100, 1], [-100, 2]]})
    assert batch.own_positions.tolist() == batch.read_positions.tolist() == [0, 2, 4]
    assert batch["token_labels"].tolist() == [3, 1, 2]
