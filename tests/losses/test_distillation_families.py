"""Self-distillation, IW-OPD, A*-PO, TPO, optimal token baselines and PPO's rejection, as every loss is tested."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError, Scores
from gradwire_losses.registry import get_loss
from support import loss_references as seven
from support.loss_properties import PROPERTIES
from support.loss_references import Examples, Result, log_sigmoid, mean, reduce, surrogate
from support.losses import (
    Case,
    Columns,
    bits,
    logps,
    numbers,
    pair_columns,
    per_row,
    read,
    row_columns,
    scored_positions,
    tokens,
)
from support.policy_batches import BASE, case, samples, teacher_columns, trajectories, unrewarded
from support.policy_references import groups, sampler_weights

# ------------------------------------------------------------------ batches


def taught_rows(rng: np.random.Generator, *fields: str, by_row: bool = False) -> Columns:
    """Rows, and the same scored tokens after another prompt."""
    columns = row_columns(rng)
    ids = columns["input_ids"]
    columns["teacher_input_ids"], columns["teacher_loss_mask"] = [], []
    for row, own in enumerate(ids):
        prompt = tokens(rng, int(rng.integers(1, 5)))
        response = [own[t] for t in scored_positions(columns, "", row)]
        columns["teacher_input_ids"].append(prompt + response)
        columns["teacher_loss_mask"].append([0] * len(prompt) + [1] * len(response))
    every = {
        "old_log_probs": logps(rng, ids, 0.5, -1.4),
        "advantages": per_row(rng, len(ids)) if by_row else numbers(rng, ids),
    }
    return columns | {name: every[name] for name in fields}


def valued_rows(rng: np.random.Generator, ref: str = "") -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    if ref:
        columns["ref_log_probs"] = logps(rng, ids, 0.5, -1.4) if ref == "tokens" else logps(rng, [0] * len(ids), 2, -5)
    return columns | {"rewards": per_row(rng, len(ids)), "optimal_values": per_row(rng, len(ids))}


def triples(rng: np.random.Generator) -> Columns:
    columns = pair_columns(rng)
    ids = [tokens(rng, int(length)) for length in rng.integers(3, 10, len(columns["prompt_lengths"]))]
    masks = bits(rng, ids, 0.9)
    masks[0], masks[4], masks[3] = [1] * len(ids[0]), [1] * len(ids[4]), [0] * len(ids[3])
    return columns | {"gold_input_ids": ids, "gold_loss_mask": masks}


def squares(columns: Columns) -> Columns:
    """With sums of squares that go with the probabilities of the tokens."""
    values = [
        [[float(np.float32(math.exp(2 * lp) + 0.5 * (1 - math.exp(lp)) ** 2)) for lp in response] for response in group]
        for group in columns["old_log_probs"]
    ]
    return columns | {"sum_pi_squared": values}


def two_tokenizers(rng: np.random.Generator, k: int = 5, ends: bool = True) -> Columns:
    """Rows in pieces, with candidates of both sides of which some are the same tokens."""
    columns = teacher_columns(rng, k)
    ids = columns["input_ids"]
    columns["student_token_ids"] = columns.pop("teacher_token_ids")
    if not ends:
        return columns
    kinds = [[[int(kind) for kind in rng.integers(0, 3, k)] for _ in row] for row in ids]
    for name, number in (("shared", 1), ("own", 2)):
        columns[name] = [[[int(kind == number) for kind in token] for token in row] for row in kinds]
    return columns | {"piece_ends": bits(rng, ids, 0.6)}


# ------------------------------------------------------------------ references


def token_baseline(examples: Examples, config: Any, *, by_rank: bool) -> Result:
    """Advantages position by position, as the definition says."""
    if hasattr(examples[0][0], "advantages"):
        return groups(examples, config)
    given = []
    for group in examples:
        returns: list[dict[int, float]] = []
        energy: list[dict[int, float]] = []
        for sample in group:
            old = getattr(sample, "old_log_probs", sample.score_logprobs)
            weights = sampler_weights(sample, config) or [1.0] * sample.n
            total, own = 0.0, {}
            for t in range(sample.n):
                square = sample.sum_pi_squared[t] if hasattr(sample, "sum_pi_squared") else None
                square = math.exp(sample.score_collision[t]) if square is None else square
                total += (1 - 2 * math.exp(old[t]) + square) * weights[t] ** 2
                own[t if by_rank else sample.positions[t]] = total
            energy.append(own)
            returns.append(dict.fromkeys(own, sample.rewards))
        above: dict[int, float] = defaultdict(float)
        below: dict[int, float] = defaultdict(float)
        for own, gains in zip(energy, returns, strict=True):
            for place, weight in own.items():
                above[place] += gains[place] * weight
                below[place] += weight
        ends = [max(own) + 1 if own else 0 for own in energy]
        second = sorted(ends)[-2] if len(ends) > 1 else 0
        several = sum(end > 0 for end in ends) > 1
        for gains in returns:
            advantages = []
            for place, gain in gains.items():
                none = config.zero_tail and place >= second
                baseline = 0.0 if none else above[place] / (below[place] + 1e-8)
                advantages.append(gain - baseline if several else 0.0)
            given.append(advantages)
    return groups(examples, config, given)


def a2po(examples: Examples, config: Any) -> Result:
    losses, implicit, targets, rewards = [], [], [], []
    for [row] in examples:
        if not row.n:
            continue
        ref = getattr(row, "ref_log_probs", getattr(row, "score_ref_logprobs", None))
        total = math.fsum(ref) if isinstance(ref, list) else ref
        implicit.append(config.beta2 * (math.fsum(row.score_logprobs) - total))
        targets.append(row.rewards - row.optimal_values)
        rewards.append(row.rewards)
        losses.append((implicit[-1] - targets[-1]) ** 2)
    return mean(losses), {
        "implicit_reward": mean(implicit),
        "advantage_mean": mean(targets),
        "reward_mean": mean(rewards),
    }


def self_distillation(examples: Examples, config: Any) -> Result:
    """``config.distillation_weight`` is 1 where it is absent."""
    share = getattr(config, "distillation_weight", 1.0)
    losses, surrogates, gaps, nlls, ratios = [], [], [], [], []
    for student, teacher in examples:
        given = getattr(teacher, "score_ref_logprobs", teacher.score_logprobs)
        own, others = [], []
        for t, (lp, theirs) in enumerate(zip(student.score_logprobs, given, strict=True)):
            old = student.old_log_probs[t] if hasattr(student, "old_log_probs") else None
            ratio = 1.0
            if config.is_clip is not None and old is not None:
                ratio = min(math.exp(lp - old), config.is_clip)
            own.append(ratio * (lp - theirs) * lp)
            gaps.append(lp - theirs)
            nlls.append(-theirs)
            ratios.append(ratio)
            if share < 1:
                given_advantage = student.advantages
                a = given_advantage[t] if isinstance(given_advantage, list) else given_advantage
                high = config.clip_epsilon_high or config.clip_epsilon
                r = math.exp(lp - (lp if old is None else old))
                others.append(surrogate(r, a, 1 - config.clip_epsilon, 1 + high, None)[0])
        losses.append(own)
        surrogates.append(others)
    policy = reduce(surrogates, config) if share < 1 else math.nan
    metrics = {
        "distillation_loss": mean([x for own in losses for x in own]),
        "reverse_kl": mean(gaps),
        "teacher_nll": mean(nlls),
        "is_ratio_mean": mean(ratios),
        "num_tokens": len(gaps),
    }
    if not hasattr(config, "distillation_weight"):
        return reduce(losses, config), metrics
    loss = share * reduce(losses, config) + ((1 - share) * policy if share < 1 else 0.0)
    return loss, metrics | {"policy_loss": policy}


def iw_opd(examples: Examples, config: Any) -> Result:
    losses, kls, everything, all_weights = [], [], [], []
    for [row] in examples:
        ref = getattr(row, "ref_log_probs", getattr(row, "score_ref_logprobs", None))
        assert ref is not None
        old = getattr(row, "old_log_probs", row.score_logprobs)
        gaps = [f - o for f, o in zip(ref, old, strict=True)]
        total = max(1e-8, math.fsum(map(abs, gaps)))
        weights = [1 + config.gamma * (1 - math.fsum(map(abs, gaps[:t])) / total) for t in range(row.n)]
        advantages = [w * g for w, g in zip(weights, gaps, strict=True)]
        losses.append([-a * lp for a, lp in zip(advantages, row.score_logprobs, strict=True)])
        kls += [-g for g in gaps]
        everything += advantages
        all_weights += weights
    policy = reduce(losses, config)
    return policy, {
        "policy_loss": policy,
        "reverse_kl": mean(kls),
        "advantage_mean": mean(everything),
        "weight_mean": mean(all_weights),
        "num_tokens": len(kls),
    }


def tpo(examples: Examples, config: Any) -> Result:
    means = config.loss_type in ("ipo", "tpo-l")
    losses, gold, sums, rewards = [], [], [], []
    for chosen, rejected, best in examples:
        if not (chosen.n and rejected.n and best.n):
            continue
        total = [math.fsum(each.score_logprobs) for each in (chosen, rejected)]
        c, w = (x / each.n if means else x for x, each in zip(total, (chosen, rejected), strict=True))
        z = config.beta * (c - w)
        if config.loss_type == "hinge":
            losses.append(max(0.0, 1 - z))
        elif config.loss_type == "ipo":
            losses.append((c - w - 1 / (2 * config.beta)) ** 2)
        else:
            z -= config.tpo_l_gamma if config.loss_type == "tpo-l" else 0.0
            e = config.label_smoothing
            losses.append(-(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z))
        gold += [-lp for lp in best.score_logprobs]
        sums.append(total)
        rewards.append((config.beta * c, config.beta * w))
    nll = mean(gold)
    return mean(losses) + config.tpo_alpha * nll, {
        "nll_loss": nll,
        "chosen_reward": mean([c for c, _ in rewards]),
        "rejected_reward": mean([w for _, w in rewards]),
        "reward_margin": mean([c - w for c, w in rewards]),
        "preference_accuracy": mean([float(c > w) for c, w in rewards]),
        "chosen_log_probs": mean([c for c, _ in sums]),
        "rejected_log_probs": mean([w for _, w in sums]),
        "num_pairs": len(losses),
    }


def gold(examples: Examples, config: Any) -> Result:
    """Piece by piece, in probabilities."""
    losses, divergences, distances, teacher_masses, student_masses, tokens_ = [], [], [], [], [], 0
    for [row] in examples:
        own, product, tokens_ = [], 1.0, tokens_ + row.n
        for t in range(row.n):
            if hasattr(row, "piece_ends") and not row.piece_ends[t]:
                product *= math.exp(row.score_logprobs[t])
                continue
            mine = [product * math.exp(x) for x in row.score_candidate_logprobs[t]]
            theirs = [math.exp(x) for x in row.teacher_log_probs[t]]
            product, k = 1.0, len(mine)
            shared = row.shared[t] if hasattr(row, "shared") else [0] * k
            alone = row.own[t] if hasattr(row, "own") else [1 - x for x in shared]
            divergence = 0.0
            for p, q, same in zip(mine, theirs, shared, strict=True):
                if same:
                    m = config.beta * q + (1 - config.beta) * p
                    a = q * math.log(q / (p if config.beta == 0 else m))
                    b = p * math.log(p / (q if config.beta == 1 else m))
                    weight = config.beta if 0 < config.beta < 1 else 1 - config.beta
                    divergence += weight * a + (1 - weight) * b
            left = sorted((p for p, mark in zip(mine, alone, strict=True) if mark), reverse=True)
            right = sorted((q for q, same in zip(theirs, shared, strict=True) if not same), reverse=True)
            width = max(len(left), len(right))
            left, right = left + [0.0] * (width - len(left)), right + [0.0] * (width - len(right))
            distances.append(math.fsum(abs(p - q) for p, q in zip(left, right, strict=True)))
            divergences.append(divergence)
            teacher_masses.append(math.fsum(theirs))
            student_masses.append(math.fsum(p for p, a, b in zip(mine, shared, alone, strict=True) if a or b))
            own.append(config.shared_weight * divergence + config.own_weight * distances[-1])
        losses.append(own)
    return reduce(losses, config), {
        "shared_divergence": mean(divergences),
        "own_distance": mean(distances),
        "teacher_mass": mean(teacher_masses),
        "student_mass": mean(student_masses),
        "num_pieces": len(divergences),
        "num_tokens": tokens_,
    }


SAMPLED = ("old_log_probs", "sampler_log_probs")


def sampled_trajectories(rng: np.random.Generator) -> Any:
    columns = trajectories(rng, "old_log_probs", "old_values")
    return columns | {"sampler_log_probs": logps(rng, columns["input_ids"], 0.7, -1.4)}


def baseline_cases(loss: str, by_rank: bool) -> list[Case]:
    reference = partial(token_baseline, by_rank=by_rank)
    return [
        case(loss, lambda r: samples(r, "old_log_probs"), reference),
        case(loss, lambda r: samples(r), reference, "current", zero_tail=False),
        case(loss, lambda r: squares(samples(r, *SAMPLED)), reference, "weighted",
             sampler_correction="token_truncate", sampler_ratio_max=1.5),
        case(loss, lambda r: samples(r, "old_log_probs", "token_advantages"), reference, "given"),
    ]  # fmt: skip


CASES = [
    *baseline_cases("optimal_token_baseline", False),
    *baseline_cases("tir_optimal_token_baseline", True),
    case("a2po", valued_rows, a2po, **BASE),
    case("a2po", lambda r: valued_rows(r, "tokens"), a2po, "tokens", beta2=0.3),
    case("a2po", lambda r: valued_rows(r, "rows"), a2po, "rows", beta2=0.3),
    case("sdft", lambda r: taught_rows(r, "old_log_probs"), self_distillation, gradcheck=False, **BASE),
    case("sdft", taught_rows, self_distillation, "live", gradcheck=False, reduction="token_mean"),
    case("sdpo", lambda r: taught_rows(r, "old_log_probs"), self_distillation, gradcheck=False, **BASE),
    case("sdpo", lambda r: taught_rows(r, "old_log_probs", "advantages"), self_distillation, "mixed",
         gradcheck=False, distillation_weight=0.3, is_clip=1.2, **BASE),
    case("sdpo", lambda r: taught_rows(r, "advantages", by_row=True), self_distillation, "surrogate",
         gradcheck=False, distillation_weight=0.0, is_clip=None, clip_epsilon_high=0.4),
    case("iw_opd", lambda r: unrewarded(r, "old_log_probs"), iw_opd, **BASE),
    case("iw_opd", lambda r: unrewarded(r, "ref_log_probs"), iw_opd, "fresh", gradcheck=False, gamma=2.0),
    *(case("gold", two_tokenizers, gold, f"beta {beta:g}", beta=beta, shared_weight=0.7, own_weight=0.4)
      for beta in (0.0, 0.3, 1.0)),
    case("gold", lambda r: two_tokenizers(r, ends=False), gold, "sorted", reduction="token_mean"),
    *(case("tpo", triples, tpo, kind, loss_type=kind, beta=0.3, tpo_alpha=0.7, label_smoothing=0.1)
      for kind in ("sigmoid", "hinge", "ipo", "tpo-l")),
    *(case("enhanced_ppo", sampled_trajectories, seven.ppo, mode, sampler_rejection=mode, sampler_rejection_max=bound)
      for mode, bound in (("seq_mean_k1", 1.3), ("seq_mean_k3", 0.15))),
    case("conservative_ppo", sampled_trajectories, seven.conservative_ppo, "rejection",
         sampler_rejection="seq_mean_k3", sampler_rejection_max=0.15),
]  # fmt: skip


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    check(case, rng)


@pytest.mark.parametrize("name", ["sdft", "sdpo"])
def test_the_gradient_is_that_of_the_reverse_kl_at_the_sampled_tokens(name: str, rng: np.random.Generator) -> None:
    """d loss / d log p = (log p - log teacher) / (tokens of the row) / rows, from the student's tokens alone."""
    spec = get_loss(name)
    batch = read(spec, taught_rows(rng))
    logprobs = torch.from_numpy(rng.normal(-2, 0.5, batch.num_scored)).requires_grad_()
    teacher = torch.from_numpy(rng.normal(-2, 0.5, batch.num_scored))
    scores = Scores({"logprobs": logprobs, "ref_logprobs": teacher})
    loss = spec.function(batch, scores, spec.config(reference_model="ema")).loss()
    [gradient] = torch.autograd.grad(loss, logprobs)
    lengths = batch.row_lengths.view(-1, 2)[:, 0]
    rows, at = int((lengths > 0).sum()), 0
    for length in lengths.tolist():
        student, taught = slice(at, at + length), slice(at + length, at + 2 * length)
        expected = (logprobs[student] - teacher[taught]).detach() / max(1, length) / rows
        torch.testing.assert_close(gradient[student], expected)
        assert not gradient[taught].any()
        at += 2 * length


def test_another_response_after_the_teachers_prompt_is_refused(rng: np.random.Generator) -> None:
    spec, columns = get_loss("sdft"), taught_rows(rng)
    columns["teacher_input_ids"][3][-1] = (columns["teacher_input_ids"][3][-1] + 1) % 50
    batch = read(spec, columns)
    zeros = torch.zeros(batch.num_scored)
    with pytest.raises(BatchError, match="row 3: the tokens that teacher_loss_mask scores"):
        spec.function(batch, Scores({"logprobs": zeros}), spec.config())
    columns["teacher_loss_mask"][3][-1] = 0
    batch = read(spec, columns)
    with pytest.raises(BatchError, match="row 3"):
        spec.function(batch, Scores({"logprobs": torch.zeros(batch.num_scored)}), spec.config())


def test_a_mixture_without_advantages_is_refused(rng: np.random.Generator) -> None:
    spec = get_loss("sdpo")
    batch = read(spec, taught_rows(rng))
    with pytest.raises(BatchError, match="needs advantages"):
        spec.function(batch, Scores({"logprobs": torch.zeros(batch.num_scored)}), spec.config(distillation_weight=0.5))


@pytest.mark.parametrize("kwargs", [{"baseline": "leave_one_out"}, {"scale_rewards": True}, {"kl_in_reward": True}])
def test_another_advantage_is_refused_beside_the_token_baseline(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its own advantages"):
        get_loss("optimal_token_baseline").config(**kwargs)


def test_a_rejected_row_is_as_if_it_were_not_there(rng: np.random.Generator) -> None:
    columns = sampled_trajectories(rng)
    columns["sampler_log_probs"] = [list(row) for row in columns["old_log_probs"]]
    columns["sampler_log_probs"][3] = [x - 1 for x in columns["old_log_probs"][3]]
    spec = get_loss("enhanced_ppo")
    rejecting = spec.config(sampler_rejection="seq_mean_k1", sampler_rejection_max=1.001)
    drawn = Case("enhanced_ppo", lambda _: columns, {}, seven.ppo).draw(rng)
    output = spec.function(drawn.batch, Scores(drawn.scores), rejecting)
    without = drawn.part([0, 1, 2, 4, 5])
    assert output.loss().item() == pytest.approx(without.loss().item(), rel=1e-12)
    assert 0 < output.metrics["kept_fraction"].value() < 1
    assert math.isclose(output.metrics["approx_kl"].value(), without.metrics["approx_kl"].value())
