"""Reward models and classifiers against plain references, and what their labels must be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gradwire_losses.batch import BatchError
from gradwire_losses.registry import get_loss
from support.loss_properties import PROPERTIES
from support.loss_references import Examples, Result, log_sigmoid, mean, reduce, std, variance
from support.losses import NUM_CLASSES, Case, Columns, group_columns, per_row, read, row_columns


def score_regression(examples: Examples, config: Any) -> Result:
    losses, errors, predictions, targets = [], [], [], []
    for [row] in examples:
        y = row.scores
        if config.score_min is not None:
            y = (y - config.score_min) / (config.score_max - config.score_min)
        if config.score_mean is not None:
            y = (y - config.score_mean) / config.score_std
        e, d = row.score_rewards - y, config.huber_delta
        loss = e * e
        if config.loss_type == "huber":
            loss = e * e / 2 if abs(e) <= d else d * (abs(e) - d / 2)
        losses.append(loss * getattr(row, "weights", 1.0))
        errors.append(e)
        predictions.append(row.score_rewards)
        targets.append(y)
    mp, mt = mean(predictions), mean(targets)
    covariance = mean([(p - mp) * (t - mt) for p, t in zip(predictions, targets, strict=True)])
    spread = math.sqrt(mean([(p - mp) ** 2 for p in predictions]) * mean([(t - mt) ** 2 for t in targets]))
    return mean(losses), {
        "mse": mean([e * e for e in errors]),
        "mae": mean([abs(e) for e in errors]),
        "correlation": covariance / spread,
        "prediction_mean": mp,
        "prediction_std": std(predictions),
    }


def reward_regression(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples]
    ratings = [row.scores for row in rows]
    heads = [row.score_rewards for row in rows]
    losses = [
        getattr(row, "weights", 1.0) * (head - (rating - config.score_mean) / config.score_std) ** 2
        for row, rating, head in zip(rows, ratings, heads, strict=True)
    ]
    predicted = [config.score_mean + config.score_std * head for head in heads]
    errors = [p - s for p, s in zip(predicted, ratings, strict=True)]
    mp, ms = mean(predicted), mean(ratings)
    covariance = mean([(p - mp) * (s - ms) for p, s in zip(predicted, ratings, strict=True)])
    spread = math.sqrt(mean([(p - mp) ** 2 for p in predicted]) * mean([(s - ms) ** 2 for s in ratings]))
    return mean(losses), {
        "mse": mean([e * e for e in errors]),
        "mae": mean([abs(e) for e in errors]),
        "correlation": covariance / spread,
        "explained_variance": 1 - variance(errors) / (variance(ratings) + 1e-5),
        "prediction_mean": mp,
    }


def plackett_luce(examples: Examples, config: Any) -> Result:
    losses, tops, pairs, everything = [], [], [], []
    for group in examples:
        everything += [sample.score_rewards for sample in group]
        if len(group) < 2:
            continue
        ranked = sorted(group, key=lambda sample: sample.ranks) if hasattr(group[0], "ranks") else group
        rewards = [sample.score_rewards / config.temperature for sample in ranked]
        total = 0.0
        for k in range(len(rewards) - 1):
            if config.top_k is None or k < config.top_k:
                total -= rewards[k] - math.log(math.fsum(math.exp(r) for r in rewards[k:]))
        losses.append(total)
        tops.append(float(all(rewards[0] > other for other in rewards[1:])))
        pairs += [float(rewards[i] > rewards[j]) for i in range(len(rewards)) for j in range(i + 1, len(rewards))]
    return mean(losses), {
        "top_accuracy": mean(tops),
        "pair_accuracy": mean(pairs),
        "reward_mean": mean(everything),
        "reward_std": std(everything),
        "num_groups": len(losses),
    }


def process_reward(examples: Examples, config: Any) -> Result:
    losses, right, rows, probabilities = [], [], [], []
    for [row] in examples:
        verdicts: list[bool] = []
        losses.append([])
        for y, z in zip(row.step_labels, row.score_token_rewards, strict=True):
            losses[-1].append(-y * log_sigmoid(z) - (1 - y) * log_sigmoid(-z))
            verdicts.append((z > 0) == (y > 0.5))
            probabilities.append(math.exp(log_sigmoid(z)))
        right += [float(verdict) for verdict in verdicts]
        if verdicts:
            rows.append(float(all(verdicts)))
    return reduce(losses, config), {
        "step_accuracy": mean(right),
        "row_accuracy": mean(rows),
        "step_probability": mean(probabilities),
        "num_steps": sum(map(len, losses)),
    }


def _cross_entropy(logits: list[float], label: int, smoothing: float) -> float:
    log_total = math.log(math.fsum(math.exp(z) for z in logits))
    target = [smoothing / len(logits) + (1 - smoothing) * (c == label) for c in range(len(logits))]
    return -math.fsum(q * (z - log_total) for q, z in zip(target, logits, strict=True))


def sequence_classification(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples]
    losses = [
        _cross_entropy(row.score_class_logits, row.label, config.label_smoothing) * getattr(row, "weights", 1.0)
        for row in rows
    ]
    hits = [float(max(range(len(z)), key=z.__getitem__) == row.label) for row in rows for z in [row.score_class_logits]]
    return mean(losses), {"accuracy": mean(hits), "num_rows": len(rows)}


def token_classification(examples: Examples, config: Any) -> Result:
    tokens = [(z, y) for [row] in examples for z, y in zip(row.score_token_class_logits, row.token_labels, strict=True)]
    losses = [_cross_entropy(z, y, config.label_smoothing) for z, y in tokens]
    return mean(losses), {
        "accuracy": mean([float(max(range(len(z)), key=z.__getitem__) == y) for z, y in tokens]),
        "num_tokens": len(tokens),
    }


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
    case("score_regression", scored_rows, score_regression),
    case("score_regression", scored_rows, score_regression, "range", score_min=1.0, score_max=5.0),
    case(
        "score_regression",
        lambda r: scored_rows(r, weights=True),
        score_regression,
        "standardised",
        score_mean=3.0,
        score_std=1.2,
        loss_type="huber",
        huber_delta=0.7,
    ),
    case("reward_regression", scored_rows, reward_regression),
    case(
        "reward_regression",
        lambda r: scored_rows(r, weights=True),
        reward_regression,
        "standardised",
        score_mean=3.0,
        score_std=1.2,
    ),
    case("plackett_luce", rankings, plackett_luce),
    case("plackett_luce", lambda r: rankings(r, ranks=True), plackett_luce, "ranks", temperature=0.5),
    case("plackett_luce", lambda r: rankings(r, ranks=True), plackett_luce, "top", top_k=2),
    case("process_reward", steps, process_reward),
    case("process_reward", lambda r: steps(r, soft=True), process_reward, "soft"),
    case("process_reward", steps, process_reward, "rows", reduction="sequence_mean"),
    case("process_reward", steps, process_reward, "fixed", reduction="fixed", reduction_divisor=3.0),
    case("sequence_classification", classes, sequence_classification),
    case(
        "sequence_classification",
        lambda r: classes(r, weights=True),
        sequence_classification,
        "smoothed",
        label_smoothing=0.1,
    ),
    case("token_classification", token_classes, token_classification),
    case("token_classification", token_classes, token_classification, "smoothed", label_smoothing=0.2),
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
