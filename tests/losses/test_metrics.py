"""Every metric of every loss once in numpy, from its sentence in the documentation, over a batch with everything in it.

The batches have rows of unequal and of no length, masks, weights, ties, and all log-probabilities that a loss knows;
the arguments reject, clip and correct. The names come from what a loss returns: a new loss or metric fails here until
it is computed by hand, here or in ``support/policy_metrics.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.registry import all_losses, get_loss
from support import policy_metrics as by_hand
from support.losses import (
    NUM_CLASSES,
    Case,
    Columns,
    Drawn,
    bits,
    flat,
    group_columns,
    logps,
    numbers,
    pair_columns,
    per_row,
    row_columns,
    tokens,
    values_of,
)
from support.policy_batches import BASE, predictions, samples, teacher_columns, trajectories, unrewarded
from support.policy_metrics import CORRECTED, UNCLIPPED, Figures, View, sigmoid, std

SEED = 22


# ------------------------------------------------------------------ preferences, rewards, classes


def pairs(drawn: Drawn) -> Figures:
    """Implicit rewards as each loss defines them; examples without a scored token on a side are left out."""
    c, loss = drawn.config, drawn.spec.name
    complete = [group for group in drawn.examples() if all(each.n for each in group)]
    sums = np.array([[math.fsum(each.score_logprobs) for each in group] for group in complete])
    means = sums / np.array([[each.n for each in group] for group in complete])
    if loss == "dpo":
        ratios = []
        for group in complete:
            shared = min(each.n for each in group)
            own = [np.array(each.score_logprobs) - each.ref_log_probs for each in group]
            ratios.append(
                [x[:shared].sum() + (1 if c.ld_alpha is None else c.ld_alpha) * x[shared:].sum() for x in own]
            )
        rewards = c.beta * np.array(ratios)
    elif loss in ("simpo", "orpo"):
        rewards = c.beta * means
    elif loss == "cpo" and c.alpha:
        rewards = c.beta * (1 - np.exp(-c.alpha * means)) / c.alpha
    else:
        rewards = c.beta * (means if getattr(c, "loss_type", "") in ("ipo", "tpo-l") else sums)[:, :2]
    figures = {
        "chosen_reward": rewards[:, 0].mean(), "rejected_reward": rewards[:, 1].mean(),
        "reward_margin": (rewards[:, 0] - rewards[:, 1]).mean(),
        "preference_accuracy": (rewards[:, 0] > rewards[:, 1]).mean(),
        "chosen_log_probs": sums[:, 0].mean(), "rejected_log_probs": sums[:, 1].mean(), "num_pairs": len(complete),
    }  # fmt: skip
    odds = by_hand.log_odds(means[:, 0]) - by_hand.log_odds(means[:, 1])
    of_gold = [lp for group in complete for lp in group[-1].score_logprobs]
    figures |= {
        "dpo": {"implicit_reward": rewards.mean()},
        "cpo": {"nll_loss": -means[:, 0].mean()},
        "orpo": {"nll_loss": -means[:, 0].mean(), "log_odds_ratio": odds.mean(),
                 "log_odds_chosen": np.log(sigmoid(odds)).mean()},
        "tpo": {"nll_loss": -np.mean(of_gold)},
    }.get(loss, {})  # fmt: skip
    return figures


def unpaired(drawn: Drawn) -> Figures:
    c, rows = drawn.config, [group[0] for group in drawn.examples() if group[0].n]
    others = [group[1] for group in drawn.examples() if len(group) > 1 and group[1].n]
    ratios = [np.array([sum(x.score_logprobs) - sum(x.ref_log_probs) for x in side]) for side in (rows, others)]
    rewards, good = c.beta * ratios[0], np.array([row.label for row in rows]) > 0
    return {
        "chosen_reward": rewards[good].mean(), "rejected_reward": rewards[~good].mean(),
        "reward_margin": rewards[good].mean() - rewards[~good].mean(), "desirable_share": good.mean(),
        **({"kl": max(0.0, ratios[1].mean())} if drawn.spec.name == "kto" else {"delta": rewards.mean()}),
    }  # fmt: skip


def reward_modeling(drawn: Drawn) -> Figures:
    chosen, rejected = np.array([[each.score_rewards for each in group] for group in drawn.examples()]).T
    return {
        "preference_accuracy": (chosen > rejected).mean(), "reward_margin": (chosen - rejected).mean(),
        "chosen_reward_mean": chosen.mean(), "rejected_reward_mean": rejected.mean(),
        "chosen_reward_std": std(chosen), "rejected_reward_std": std(rejected), "num_pairs": len(chosen),
    }  # fmt: skip


def regression(drawn: Drawn) -> Figures:
    v, c = View(flat(drawn.examples()), drawn.config), drawn.config
    given, predicted = v["scores"], v["score_rewards"]
    if drawn.spec.name == "score_regression":
        given = (given - c.score_min) / (c.score_max - c.score_min)
        own = {"prediction_std": std(predicted)}
    else:
        predicted = c.score_mean + c.score_std * predicted
        own = {"explained_variance": 1 - (given - predicted).var(ddof=1) / (given.var(ddof=1) + 1e-5)}
    return own | {
        "mse": ((predicted - given) ** 2).mean(), "mae": abs(predicted - given).mean(),
        "correlation": np.corrcoef(predicted, given)[0, 1], "prediction_mean": predicted.mean(),
    }  # fmt: skip


def ranking(drawn: Drawn) -> Figures:
    """A tie is no order."""
    best, ordered, several = [], [], 0
    for group in drawn.examples():
        ranked = [each.score_rewards for each in sorted(group, key=lambda each: each.ranks)]
        if len(ranked) > 1:
            several += 1
            best.append(all(ranked[0] > other for other in ranked[1:]))
            ordered += [ranked[i] > ranked[j] for j in range(len(ranked)) for i in range(j)]
    rewards = np.array([each.score_rewards for each in flat(drawn.examples())])
    return {
        "top_accuracy": np.mean(best), "pair_accuracy": np.mean(ordered), "reward_mean": rewards.mean(),
        "reward_std": std(rewards), "num_groups": several,
    }  # fmt: skip


def process_reward(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    chance = sigmoid(v["score_token_rewards"])
    right = (chance > 0.5) == (v["step_labels"] > 0.5)
    whole = v.total(right.astype(float)) == v.n
    return {
        "step_accuracy": right.mean(), "row_accuracy": whole[v.n > 0].mean(), "step_probability": chance.mean(),
        "num_steps": v.n.sum(),
    }  # fmt: skip


def classification(drawn: Drawn, logits: str, label: str, count: str) -> Figures:
    """A class that is as probable as another is not the most probable one."""
    v = View(flat(drawn.examples()), drawn.config)
    z, y = v[logits], v[label].astype(int)
    own = z[np.arange(len(y)), y]
    return {"accuracy": ((z >= own[:, None]).sum(1) == 1).mean(), count: len(y)}


# ------------------------------------------------------------------ batches


def responses(rng: np.random.Generator, *fields: str) -> Columns:
    return samples(
        rng, "old_log_probs", "ref_log_probs", "sampler_log_probs", "truncated", "planning_mask", *fields
    )  # fmt: skip


def rows(rng: np.random.Generator, *fields: str, by_row: bool = True) -> Columns:
    columns = trajectories(rng, "old_log_probs", "ref_log_probs", *fields, by_row=by_row)
    return columns | {"sampler_log_probs": logps(rng, columns["input_ids"], 0.6, -1.4)}


def prompted(rng: np.random.Generator) -> Columns:
    """Predictions of which the first are a prompt's placeholders."""
    columns = predictions(rng, "logprobs", "advantages")
    for name in ("logprobs", "advantages"):
        columns[name] = [[0.0, *row[1:]] if len(row) > 1 else row for row in columns[name]]
    columns["mask"][0] = [1] * len(columns["mask"][0])
    return columns


def off_policy(rng: np.random.Generator, by_row: bool) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    columns["behavior_log_probs"] = logps(rng, [0] * len(ids), 2.0, -5.0) if by_row else logps(rng, ids)
    return columns | {"rewards": per_row(rng, len(ids))} | ({} if by_row else {"advantages": numbers(rng, ids)})


def weighted(rng: np.random.Generator) -> Columns:
    columns = row_columns(rng)
    weights = [[abs(w) for w in row] for row in numbers(rng, columns["input_ids"])]
    weights[3][-1] = 0.0
    return columns | {"weights": weights}


def several(rng: np.random.Generator) -> Columns:
    columns = predictions(rng, "weights", candidates=3)
    columns["weights"][3][0][1] = 0.0
    return columns


def taught(rng: np.random.Generator, *fields: str) -> Columns:
    """Whole rows, and the same tokens after another prompt."""
    ids = row_columns(rng)["input_ids"]
    prompts = [tokens(rng, int(length)) for length in rng.integers(1, 5, len(ids))]
    other = [prompt + own[1:] for prompt, own in zip(prompts, ids, strict=True)]
    masks = [[0] * len(prompt) + [1] * (len(own) - 1) for prompt, own in zip(prompts, ids, strict=True)]
    every = {"old_log_probs": logps(rng, ids), "advantages": numbers(rng, ids)}
    return {"input_ids": ids, "teacher_input_ids": other, "teacher_loss_mask": masks} | {n: every[n] for n in fields}


def pieces(rng: np.random.Generator) -> Columns:
    columns = teacher_columns(rng, 5)
    columns["student_token_ids"] = columns.pop("teacher_token_ids")
    kinds = [[[int(kind) for kind in rng.integers(0, 3, 5)] for _ in row] for row in columns["input_ids"]]
    for name, number in (("shared", 1), ("own", 2)):
        columns[name] = [[[int(kind == number) for kind in token] for token in row] for row in kinds]
    return columns | {"piece_ends": bits(rng, columns["input_ids"], 0.6)}


def preferences(rng: np.random.Generator, ref: bool = False, third: bool = False) -> Columns:
    columns = pair_columns(rng)
    for side in ("chosen", "rejected") if ref else ():
        columns[f"{side}_ref_log_probs"] = logps(rng, columns[f"{side}_input_ids"])
    if third:
        columns["gold_input_ids"] = [tokens(rng, int(length)) for length in rng.integers(3, 10, 6)]
        columns["gold_loss_mask"] = bits(rng, columns["gold_input_ids"], 0.9)
        columns["gold_loss_mask"][3] = [0] * len(columns["gold_input_ids"][3])
    return columns


def labelled(rng: np.random.Generator, other: bool = False) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    columns |= {"label": [0, 1, 1, 1, 0, 1], "ref_log_probs": logps(rng, ids, 0.5, -2.0)}
    if other:
        mismatched = [tokens(rng, int(length)) for length in rng.integers(2, 9, len(ids))]
        columns |= {"kl_input_ids": mismatched, "kl_ref_log_probs": logps(rng, mismatched, 0.1, -9.0)}
    return columns


def rated(rng: np.random.Generator) -> Columns:
    ids = row_columns(rng)["input_ids"]
    scores = [float(np.float32(x)) for x in rng.uniform(1, 5, len(ids))]
    return {"input_ids": ids, "scores": scores, "weights": [abs(w) for w in per_row(rng, len(ids))]}


def ranked(rng: np.random.Generator) -> Columns:
    columns = group_columns(rng)
    ranks = [[float(rank) for rank in rng.permutation(len(group))] for group in columns["response_ids"]]
    ranks[2] = [0.0, 1.0, 2.0]
    return {name: columns[name] for name in ("prompt_ids", "response_ids")} | {"ranks": ranks}


def classes(rng: np.random.Generator, name: str, missing: float = -100) -> Columns:
    ids = row_columns(rng)["input_ids"]
    if name == "label":
        return {"input_ids": ids, "label": [int(c) for c in rng.integers(0, NUM_CLASSES, len(ids))]}
    kind, top = (float, 2) if name == "step_labels" else (int, NUM_CLASSES)
    labels = [[kind(rng.integers(0, top) if rng.random() < 0.7 else missing) for _ in row] for row in ids]
    labels[2] = [kind(missing)] * len(ids[2])
    return {"input_ids": ids, name: labels}


def tied_rewards(drawn: Drawn) -> None:
    """Equal rewards for the first two sequences, and for the best of the third group."""
    if "rewards" in drawn.scores:
        drawn.scores["rewards"][:2] = 0.5
    if "rewards" in drawn.scores and drawn.spec.layout == "groups":
        drawn.scores["rewards"][5:7] = 9.0


def tied_classes(drawn: Drawn) -> None:
    """Two labels share the first place with another class."""
    for name in ("class_logits", "token_class_logits"):
        for row in range(2) if name in drawn.scores else ():
            drawn.scores[name][row] = 3.0


def tied_pair(drawn: Drawn) -> None:
    """Nothing between the two responses of the fifth pair, nor between them and the reference."""
    if drawn.spec.layout != "pairs" or "logprobs" not in drawn.scores:
        return
    sides = drawn.batch.num_sequences // drawn.batch.num_examples
    ends = [0, *drawn.batch.row_lengths.cumsum(0).tolist()]
    span = slice(ends[4 * sides], ends[4 * sides + 2])
    drawn.scores["logprobs"][span] = (
        drawn.batch["ref_log_probs"][span] if "ref_log_probs" in drawn.batch.fields else -1.0
    )


# ------------------------------------------------------------------ the table

BOUNDS = {"clip_epsilon": 0.05, "clip_epsilon_high": 0.08, "ratio_max": 1.3}
GROUPS: dict[str, dict[str, Any]] = {
    "clip_cov": {"cov_min": 0.1, "cov_max": 0.6, "cov_share": 1.0},
    "dapo": {},
    "dppo_kl": BOUNDS,
    "dppo_tv": BOUNDS,
    "dr_grpo": {"reduction_divisor": 7.0},
    "gmpo": {},
    "gpg": {},
    "group_cispo": {"ratio_max": 1.2},
    "group_gspo": {"clip_epsilon": 0.1, "clip_epsilon_high": 0.2},
    "grpo": {},
    "gspo_token": {"clip_epsilon": 0.1, "clip_epsilon_high": 0.2},
    "kl_cov": {"cov_share": 0.2},
    "opo": {},
    "reinforce_plus_plus_baseline": {},
    "rloo": {},
    "sapo": {},
    "topr": {},
    "vespo": {},
}
OF_CRITIC = ("old_values", "bootstrap_values")
PPO = {"kl_target": 0.1, "kl_horizon": 50.0, "beta": 0.2, **CORRECTED}
BOUNDED = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}

Given = tuple[Callable[[np.random.Generator], Columns], dict[str, Any], Callable[[Drawn], Figures]]
TABLE: dict[str, list[Given]] = {
    **{loss: [(responses, CORRECTED | {"mask_truncated": True} | own, by_hand.groups)] for loss, own in GROUPS.items()},
    **{loss: [(responses, CORRECTED | {"mask_truncated": True}, by_hand.token_baseline)]
       for loss in ("optimal_token_baseline", "tir_optimal_token_baseline")},
    "gigpo": [(lambda r: responses(r, "step_ids", "anchor_ids", "step_rewards"), CORRECTED | {"mask_truncated": True},
               by_hand.gigpo)],
    "enhanced_ppo": [(lambda r: rows(r, *OF_CRITIC, by_row=False), PPO, by_hand.ppo)],
    "conservative_ppo": [
        (lambda r: rows(r, *OF_CRITIC, by_row=False), PPO | {"max_kl_divergence": bound}, by_hand.ppo)
        for bound in (0.03, 50.0)
    ],
    "value_only": [(lambda r: trajectories(r, *OF_CRITIC, by_row=True), {}, by_hand.value_only)],
    "reinforce": [(rows, {"beta": 0.3, "gamma": 0.9, "baseline": 0.2}, by_hand.reinforce)],
    "reinforce_plus_plus": [(rows, {"beta": 0.3}, by_hand.reinforce)],
    "remax": [(lambda r: rows(r, "greedy_rewards"), {"beta": 0.3}, by_hand.reinforce)],
    **{loss: [(prompted, BOUNDED, by_hand.tinker)] for loss in ("ppo", "cispo", "gspo")},
    "dro": [(prompted, {}, by_hand.tinker)],
    "importance_sampling": [
        (prompted, BASE | {"clip_ratio": 1.3}, by_hand.importance),
        (partial(off_policy, by_row=False), BASE | {"clip_ratio": 1.3}, by_hand.importance),
        (partial(off_policy, by_row=True), BASE | {"clip_ratio": 1.3}, by_hand.importance),
    ],
    "a2po": [(lambda r: row_columns(r) | {name: per_row(r, 6) for name in ("rewards", "optimal_values")}
              | {"ref_log_probs": logps(r, [0] * 6, 2.0, -5.0)}, {"beta2": 0.3}, by_hand.a2po)],
    "causal_lm": [(weighted, {}, by_hand.causal_lm)],
    "cross_entropy": [(several, {}, by_hand.cross_entropy)],
    "gkd": [(row_columns, BASE, by_hand.gkd)],
    "on_policy_distillation": [
        (lambda r: unrewarded(r, "old_log_probs", "ref_log_probs"), {"gamma": 0.9, "kl_coef": 0.5},
         by_hand.on_policy_distillation)
    ],
    "iw_opd": [(lambda r: unrewarded(r, "old_log_probs", "ref_log_probs"), {}, by_hand.iw_opd)],
    "sdft": [(lambda r: taught(r, "old_log_probs"), BASE | {"is_clip": 1.2}, by_hand.self_distillation)],
    "sdpo": [(lambda r: taught(r, "old_log_probs", "advantages"), BASE | {"is_clip": 1.2, "distillation_weight": 0.3},
              by_hand.self_distillation)],
    "top_k_distillation": [(teacher_columns, {}, by_hand.top_k)],
    "gold": [(pieces, {"beta": 0.3}, by_hand.gold)],
    "dpo": [(lambda r: preferences(r, ref=True), {"beta": 0.5, "ld_alpha": alpha}, pairs) for alpha in (None, 0.4)],
    "simpo": [(preferences, {}, pairs)],
    "orpo": [(preferences, {}, pairs)],
    "cpo": [(preferences, own, pairs) for own in ({}, {"alpha": 0.25}, {"loss_type": "ipo"})],
    "tpo": [(lambda r: preferences(r, third=True), {"loss_type": kind}, pairs) for kind in ("sigmoid", "tpo-l")],
    "kto": [(lambda r: labelled(r, other=True), {}, unpaired)],
    "bco": [(labelled, {}, unpaired)],
    "reward_modeling": [
        (lambda r: {n: ids for n, ids in pair_columns(r).items() if n.endswith("input_ids")}, {}, reward_modeling)
    ],
    "score_regression": [(rated, {"score_min": 1.0, "score_max": 5.0}, regression)],
    "reward_regression": [(rated, {"score_mean": 3.0, "score_std": 1.2}, regression)],
    "plackett_luce": [(ranked, {}, ranking)],
    "process_reward": [(partial(classes, name="step_labels"), {}, process_reward)],
    "sequence_classification": [
        (partial(classes, name="label"), {},
         partial(classification, logits="score_class_logits", label="label", count="num_rows"))
    ],
    "token_classification": [
        (partial(classes, name="token_labels"), {},
         partial(classification, logits="score_token_class_logits", label="token_labels", count="num_tokens"))
    ],
}  # fmt: skip
OURS = sorted(loss.name for loss in all_losses() if loss.function.__module__.startswith("gradwire_losses."))


@pytest.mark.parametrize("loss", OURS)
def test_each_metric_is_what_its_sentence_says(loss: str) -> None:
    assert loss in TABLE, "compute this loss's metrics by hand, in a row of TABLE"
    found: dict[str, list[float]] = {name: [] for name in get_loss(loss).metrics}
    for build, kwargs, hand in TABLE[loss]:
        drawn = Case(loss, build, kwargs, hand).draw(np.random.default_rng(SEED))
        with torch.no_grad():
            for tie in (tied_rewards, tied_classes, tied_pair):
                tie(drawn)
        returned, expected = values_of(drawn.output().metrics), hand(drawn)
        assert returned.keys() == found.keys() == expected.keys(), "a metric that is not computed by hand here"
        assert returned == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
        for name, value in returned.items():
            found[name].append(value)
    assert not {name for name, values in found.items() if all(map(math.isnan, values))}
    for name, values in found.items():
        if name.endswith(("fraction", "accuracy", "share")) and not (name == "clip_fraction" and loss in UNCLIPPED):
            assert any(0 < value < 1 for value in values), f"{name} is {values}: a batch in which it could be wrong"


def test_the_table_has_no_loss_that_is_gone() -> None:
    assert set(TABLE) == set(OURS)
