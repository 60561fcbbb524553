"""Reward models and classifiers written out in float64 Python loops."""

from __future__ import annotations

import math
from typing import Any

from support.loss_references import Examples, Result, log_sigmoid, mean, reduce, std, variance


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
        tops.append(float(max(rewards) == rewards[0]))
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
