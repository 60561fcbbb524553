"""The sampler's log-probabilities in the losses: the figures that compare them, and PPO's correction, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import Scores
from gradwire_losses.registry import get_loss
from support.losses import group_columns, logps, numbers, random_scores, read, row_columns


def evaluated(rng: np.random.Generator, loss: str, fields: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
    """The batch, its scores, and the loss's output."""
    spec = get_loss(loss)
    config = spec.config(**kwargs)
    batch = read(loss, fields)
    scores = random_scores(rng, batch, sorted(spec.scores(config, frozenset(batch.fields))))
    return batch, scores, spec.function(batch, Scores(scores), config)


def trajectories(rng: np.random.Generator) -> dict[str, Any]:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    return columns | {"old_log_probs": logps(rng, ids), "advantages": numbers(rng, ids)}


def k3(sampler: torch.Tensor, trainer: torch.Tensor) -> float:
    difference = (trainer - sampler).numpy()
    return float(np.mean(np.exp(difference) - difference - 1))


@pytest.mark.parametrize("loss", ["enhanced_ppo", "conservative_ppo"])
def test_ppo_compares_sampler_and_trainer(loss: str, rng: np.random.Generator) -> None:
    fields = trajectories(rng)
    batch, scores, output = evaluated(rng, loss, fields)
    old, logprobs = batch["old_log_probs"], scores["logprobs"].detach()
    assert output.metrics["sampler_kl"].value() == pytest.approx(k3(old, logprobs), rel=1e-9)
    assert output.metrics["sampler_logprob_diff"].value() == pytest.approx(float(np.mean((logprobs - old).numpy())))
    assert output.metrics["sampler_logprob_diff_max"].value() == pytest.approx(float((old - logprobs).abs().max()))
    batch, _, output = evaluated(rng, loss, fields | {"sampler_log_probs": logps(rng, fields["input_ids"])})
    sampler, old = batch["sampler_log_probs"], batch["old_log_probs"]
    assert output.metrics["sampler_kl"].value() == pytest.approx(k3(sampler, old), rel=1e-9)
    assert output.metrics["sampler_logprob_diff"].value() == pytest.approx(float(np.mean((old - sampler).numpy())))
    assert output.metrics["sampler_logprob_diff_max"].value() == pytest.approx(float((old - sampler).abs().max()))
    assert math.isnan(output.metrics["sampler_ratio_mean"].value())


@pytest.mark.parametrize("way", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_ppo_corrects_for_the_sampler(way: str, rng: np.random.Generator) -> None:
    fields = trajectories(rng)
    fields["sampler_log_probs"] = logps(rng, fields["input_ids"])
    kwargs = {"entropy_coef": 0.0, "sampler_correction": way, "sampler_ratio_min": 0.5, "sampler_ratio_max": 1.5}
    batch, scores, output = evaluated(rng, "enhanced_ppo", fields, **kwargs)
    logprobs, at, terms, weights = scores["logprobs"].detach().numpy(), 0, [], []
    for length in batch.row_lengths.tolist():
        row = slice(at, at + length)
        at += length
        apart = (batch["old_log_probs"][row] - batch["sampler_log_probs"][row]).numpy()
        for place in range(length):
            weight = math.exp(apart.sum() if way.startswith("sequence") else apart[place])
            kept = 0.5 <= weight <= 1.5
            weight = min(max(weight, 0.5), 1.5) if way.endswith("truncate") else weight * kept
            ratio = math.exp(logprobs[row][place] - float(batch["old_log_probs"][row][place]))
            advantage = float(batch["advantages"][row][place])
            terms.append(weight * max(-ratio * advantage, -min(max(ratio, 0.8), 1.2) * advantage))
            weights.append(weight)
    assert output.metrics["policy_loss"].value() == pytest.approx(np.mean(terms), rel=1e-9)
    assert output.metrics["sampler_ratio_mean"].value() == pytest.approx(np.mean(weights), rel=1e-9)


@pytest.mark.parametrize("loss", ["grpo", "gigpo"])
@pytest.mark.parametrize("way", ["token_truncate", "sequence_mask"])
def test_a_batch_of_one_step_needs_no_old_log_probabilities(loss: str, way: str, rng: np.random.Generator) -> None:
    """Those of the forward itself are those before the step: loss and gradient are the same, and so the weights."""
    fields = group_columns(rng)
    fields |= {
        "sampler_log_probs": logps(rng, fields["response_ids"]),
        "advantages": numbers(rng, fields["response_ids"]),
    }
    found = []
    for given in (False, True):
        spec, batch = get_loss(loss), read(loss, fields)
        config = spec.config(sampler_correction=way, entropy_coef=0.0)
        if not given:
            scores = random_scores(rng, batch, sorted(spec.scores(config, frozenset(batch.fields))))
        else:
            before = scores["logprobs"].detach().numpy()
            rows = iter(np.split(before, np.cumsum(batch.row_lengths.numpy())[:-1]))
            masks = fields.get("response_masks") or fields["response_ids"]
            old = [[np.zeros(len(mask)) for mask in group] for group in masks]
            for group, of_group in zip(old, masks):
                for row, mask in zip(group, of_group):
                    where = np.asarray(mask, bool) if "response_masks" in fields else np.ones(len(mask), bool)
                    row[where] = next(rows)
            batch = read(loss, fields | {"old_log_probs": [[row.tolist() for row in group] for group in old]})
        leaf = scores["logprobs"].detach().requires_grad_()
        output = spec.function(batch, Scores(scores | {"logprobs": leaf}), config)
        output.loss().backward()
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
        found.append((float(output.loss().detach()), leaf.grad, output.metrics["sampler_ratio_mean"].value()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6) and found[0][2] == pytest.approx(found[1][2], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-7)


def test_without_log_probabilities_there_is_nothing_to_compare(rng: np.random.Generator) -> None:
    fields = row_columns(rng) | {"rewards": numbers(rng, [0] * 6)}
    _, _, output = evaluated(rng, "reinforce", fields)
    for name in ("sampler_kl", "sampler_logprob_diff", "sampler_logprob_diff_max"):
        assert math.isnan(output.metrics[name].value())
