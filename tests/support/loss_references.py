"""The losses as float64 Python loops written from their papers: references for the real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

Examples = list[list[SimpleNamespace]]
Result = tuple[float, dict[str, float]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def std(values: list[float]) -> float:
    if not values:
        return math.nan
    return math.sqrt(variance(values))


def variance(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def zero_if_nan(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def kl(estimator: str, logprob: float, ref: float) -> float:
    d = logprob - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[estimator]


def reduce(per_sequence: list[list[float]], config: Any) -> float:
    """Reduce the losses of tokens, sequence by sequence, by ``reduction``."""
    there = [losses for losses in per_sequence if losses]
    if not there:
        return 0.0
    everything = [loss for losses in there for loss in losses]
    if config.reduction == "token_mean":
        return mean(everything)
    if config.reduction == "sequence_mean":
        return mean([mean(losses) for losses in there])
    if config.reduction == "sequence_mean_token_sum":
        return mean([math.fsum(losses) for losses in there])
    if config.reduction == "fixed":
        return mean([math.fsum(losses) / config.reduction_divisor for losses in there])
    return math.fsum(everything)


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, bool]:
    free, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    objective, active = (clipped, True) if clipped < free else (free, False)
    if dual is not None and advantage < 0 and objective < dual * advantage:
        objective, active = dual * advantage, True
    return -objective, active


def causal_lm(examples: Examples, config: Any) -> Result:
    losses, learned, hits = [], [], []
    weights = []
    for [row] in examples:
        own = getattr(row, "weights", [1.0] * row.n)
        means = getattr(row, "score_mean_logprobs", [0.0] * row.n)
        e = config.label_smoothing
        scale = [math.exp(lp) if config.loss_type == "dft" else 1.0 for lp in row.score_logprobs]
        losses.append([-(1 - e) * s * lp - e * m for s, lp, m in zip(scale, row.score_logprobs, means, strict=True)])
        weights.append(own)
        learned += [lp for lp, w in zip(row.score_logprobs, own, strict=True) if w]
        hits += [float(hit) for hit, w in zip(row.score_correct, own, strict=True) if w]
    return weighted_reduce(losses, weights, config), {
        "perplexity": math.exp(-mean(learned)),
        "num_tokens": len(learned),
        "token_accuracy": mean(hits),
    }


def weighted_reduce(losses: list[list[float]], weights: list[list[float]], config: Any) -> float:
    """Reduce as :func:`reduce` does, with weighted tokens."""
    there = [(own, w) for own, w in zip(losses, weights, strict=True) if sum(w) > 0]
    sums = [math.fsum(x * y for x, y in zip(own, w, strict=True)) for own, w in there]
    if config.reduction == "token_mean":
        return math.fsum(sums) / math.fsum(y for _, w in there for y in w)
    if config.reduction == "sequence_mean":
        return mean([total / math.fsum(w) for total, (_, w) in zip(sums, there, strict=True)])
    if config.reduction == "sequence_mean_token_sum":
        return mean(sums)
    if config.reduction == "fixed":
        return mean([total / config.reduction_divisor for total in sums])
    return math.fsum(sums)


def gae(rewards: list[float], values: list[float], gamma: float, lam: float, last: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, the sum written out."""
    following = [*values[1:], last][: len(values)]
    deltas = [r + gamma * nxt - v for r, v, nxt in zip(rewards, values, following, strict=True)]
    return [math.fsum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]


def shaped_rewards(row: SimpleNamespace, config: Any) -> list[float]:
    rewards = row.rewards if isinstance(row.rewards, list) else [0.0] * (row.n - 1) + [row.rewards] if row.n else []
    ref = getattr(row, "ref_log_probs", getattr(row, "score_ref_logprobs", None))
    if not getattr(config, "kl_in_reward", False) or ref is None:
        return rewards
    return [
        r - config.beta * kl(config.kl_estimator, o, f) for r, o, f in zip(rewards, row.old_log_probs, ref, strict=True)
    ]


def sampler_figures(sequences: Iterable[SimpleNamespace], old: str = "old_log_probs") -> dict[str, float]:
    """Differences of the sampler's log-probabilities from the batch's; without them, of the batch's from the call's."""
    pairs: list[tuple[float, float]] = []
    for row in sequences:
        given, sampler = getattr(row, old, None), getattr(row, "sampler_log_probs", None)
        trainer = row.score_logprobs if sampler is None or given is None else given
        sampler = given if sampler is None else sampler
        if isinstance(sampler, list):
            pairs += zip(sampler, trainer, strict=True)
    return {
        "sampler_kl": mean([kl("k3", s, t) for s, t in pairs]),
        "sampler_logprob_diff": mean([t - s for s, t in pairs]),
        "sampler_logprob_diff_max": max((abs(s - t) for s, t in pairs), default=math.nan),
    }


def rejected(sample: SimpleNamespace, config: Any) -> bool:
    """Whether a response's log-probabilities differ too much between sampler and trainer."""
    if config.sampler_rejection is None or not sample.n:
        return False
    ratios = [math.exp(o - s) for o, s in zip(sample.old_log_probs, sample.sampler_log_probs, strict=True)]
    if config.sampler_rejection == "seq_mean_k3":
        return mean([r - 1 - math.log(r) for r in ratios]) > config.sampler_rejection_max
    geometric = math.prod(ratios) ** (1 / sample.n)
    low = config.sampler_rejection_min or 1 / config.sampler_rejection_max
    return not low <= geometric <= config.sampler_rejection_max


def ppo(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples if not rejected(row, config)]
    tokens = sum(row.n for [row] in examples)
    kept = sum(row.n for row in rows) / tokens if tokens else math.nan
    surrogates, value_losses, entropies, kls = [], [], [], []
    advantages_all, returns_all, baselines, predictions, approx, clips, totals = [], [], [], [], [], [], []
    per_row = []
    rewarded = hasattr(rows[0], "rewards")
    critic = rewarded and (hasattr(rows[0], "score_values") or hasattr(rows[0], "values"))
    centre, spread = 0.0, 1.0
    if config.whiten_rewards and critic:
        everything = [r for row in rows for r in shaped_rewards(row, config)]
        centre, spread = zero_if_nan(mean(everything)), math.sqrt(variance(everything) + 1e-8)
    for row in rows:
        n = row.n
        ref = getattr(row, "ref_log_probs", getattr(row, "score_ref_logprobs", None))
        if rewarded and n:
            totals.append(math.fsum(row.rewards) if isinstance(row.rewards, list) else row.rewards)
        given = getattr(row, "advantages", [])
        given = given if isinstance(given, list) else [given] * n
        if not critic:
            per_row.append((row, ref, [0.0] * n, [0.0] * n, [0.0] * n, given))
            advantages_all += given
            continue
        rewards = [(r - centre) / spread + centre for r in shaped_rewards(row, config)]
        predicted = getattr(row, "score_values", getattr(row, "values", None))
        baseline = getattr(row, "old_values", getattr(row, "values", predicted))
        lam = config.gae_lambda if config.use_gae else 1.0
        advantages = gae(rewards, baseline, config.gamma, lam, getattr(row, "bootstrap_values", 0.0))
        returns = [a + v for a, v in zip(advantages, baseline, strict=True)]
        advantages = given if hasattr(row, "advantages") else advantages
        per_row.append((row, ref, predicted, baseline, returns, advantages))
        advantages_all += advantages
        returns_all += returns
        baselines += baseline
        predictions += predicted
    shift, scale = 0.0, 1.0
    if config.whiten_advantages and not hasattr(rows[0], "advantages"):
        shift, scale = zero_if_nan(mean(advantages_all)), math.sqrt(variance(advantages_all) + 1e-8)
    high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
    value_eps = config.value_clip_epsilon or config.clip_epsilon
    for row, ref, predicted, baseline, returns, advantages in per_row:
        parts: tuple[list[float], ...] = ([], [], [], [])
        for t in range(row.n):
            lp, old = row.score_logprobs[t], row.old_log_probs[t]
            loss, active = surrogate(
                math.exp(lp - old), (advantages[t] - shift) / scale, 1 - config.clip_epsilon, 1 + high, config.dual_clip
            )
            target = returns[t]
            error = (predicted[t] - target) ** 2
            if config.clip_value_loss:
                near = baseline[t] + min(max(predicted[t] - baseline[t], -value_eps), value_eps)
                error = max(error, (near - target) ** 2)
            divergence = kl(config.kl_estimator, lp, old if ref is None else ref[t])
            for part, number in zip(parts, (loss, error / 2, row.score_entropy[t], divergence), strict=True):
                part.append(number)
            approx.append(math.exp(lp - old) - 1 - (lp - old))
            clips.append(float(active))
        for into, part in zip((surrogates, value_losses, entropies, kls), parts, strict=True):
            into.append(part)
    policy, value = reduce(surrogates, config), reduce(value_losses, config)
    with_reference = per_row[0][1] is not None and not config.kl_in_reward
    loss = (
        policy
        + config.value_loss_coef * value
        - config.entropy_coef * reduce(entropies, config)
        + (config.beta * reduce(kls, config) if with_reference else 0.0)
    )
    residuals = [r - v for r, v in zip(returns_all, baselines, strict=True)]
    critic = critic and bool(returns_all)  # a mean over nothing is NaN: all rows may be rejected
    drift = 0.0
    if config.kl_target is not None:
        drift = min(max(mean([x for part in kls for x in part]) / config.kl_target - 1, -0.2), 0.2)
    return loss, {
        "policy_loss": policy if approx else math.nan,
        "value_loss": value if critic else math.nan,
        "entropy": mean([x for part in entropies for x in part]),
        "kl_divergence": mean([x for part in kls for x in part]),
        "approx_kl": mean(approx),
        "clip_fraction": mean(clips),
        "advantage_mean": mean([(a - shift) / scale for a in advantages_all]),
        "advantage_std": std([(a - shift) / scale for a in advantages_all]),
        "advantage_mean_raw": mean(advantages_all),
        "advantage_std_raw": std(advantages_all),
        "explained_variance": 1 - variance(residuals) / (variance(returns_all) + 1e-5) if critic else math.nan,
        "value_mean": mean(predictions),
        "return_mean": mean(returns_all),
        "reward_mean": mean(totals),
        "kept_fraction": kept,
        "sampler_ratio_mean": math.nan,
        **sampler_figures(rows),
        "next_beta": config.beta * (1 + zero_if_nan(drift) * sum(row.n > 0 for row in rows) / config.kl_horizon),
    }


def conservative_ppo(examples: Examples, config: Any) -> Result:
    loss, metrics = ppo(examples, config)
    violation = max(0.0, metrics["kl_divergence"] - config.max_kl_divergence)
    penalty = config.conservative_coef * violation**2
    return loss + penalty, metrics | {
        "kl_violation": float(violation > 0),
        "kl_excess": math.nan if math.isnan(metrics["kl_divergence"]) else violation,
        "kl_penalty": math.nan if math.isnan(metrics["kl_divergence"]) else penalty,
        "max_kl_threshold": config.max_kl_divergence,
    }


def group_advantages(rewards: list[float], scale: bool) -> list[float]:
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (std(rewards) + 1e-4 if scale else 1.0) for r in rewards]


def grpo(examples: Examples, config: Any) -> Result:
    surrogates, kls, entropies, advantages_all = [], [], [], []
    approx, clips = [], []
    high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
    has_reference = False
    for group in examples:
        advantages = group_advantages([sample.rewards for sample in group], config.scale_rewards)
        advantages_all += advantages
        for sample, advantage in zip(group, advantages, strict=True):
            losses, divergences = [], []
            ref = getattr(sample, "ref_log_probs", getattr(sample, "score_ref_logprobs", None))
            has_reference |= ref is not None
            for t in range(sample.n):
                lp = sample.score_logprobs[t]
                old = sample.old_log_probs[t] if hasattr(sample, "old_log_probs") else lp
                loss, active = surrogate(
                    math.exp(lp - old), advantage, 1 - config.clip_epsilon, 1 + high, config.dual_clip
                )
                losses.append(loss)
                divergences.append(kl(config.kl_estimator, lp, old if ref is None else ref[t]))
                approx.append(math.exp(lp - old) - 1 - (lp - old))
                clips.append(float(active))
            surrogates.append(losses)
            kls.append(divergences)
            entropies.append(sample.score_entropy)
    policy = reduce(surrogates, config)
    loss = policy - config.entropy_coef * reduce(entropies, config)
    if has_reference:
        loss += config.beta * reduce(kls, config)
    rewards = [[sample.rewards for sample in group] for group in examples]
    return loss, {
        "policy_loss": policy,
        "entropy": mean([x for part in entropies for x in part]),
        "kl_divergence": mean([x for part in kls for x in part]),
        "approx_kl": mean(approx),
        "clip_fraction": mean(clips),
        "advantage_mean": mean(advantages_all),
        "advantage_std": std(advantages_all),
        "reward_mean": mean([r for group in rewards for r in group]),
        "group_reward_mean": mean([mean(group) for group in rewards]),
        "group_reward_std": mean([std(group) if len(set(group)) > 1 else 0.0 for group in rewards]),
        "zero_spread_groups": mean([float(len(set(group)) < 2) for group in rewards]),
        "kept_fraction": 1.0 if approx else math.nan,
        "sampler_ratio_mean": math.nan,
        **sampler_figures(sample for group in examples for sample in group),
        "planning_fraction": math.nan,
    }


def importance_sampling(examples: Examples, config: Any) -> Result:
    losses, ratios, kls, kl_terms, advantages_all, totals = [], [], [], [], [], []
    for [row] in examples:
        if not row.n:
            continue
        if hasattr(row, "rewards"):
            totals.append(math.fsum(row.rewards) if isinstance(row.rewards, list) else row.rewards)
        ref = getattr(row, "ref_log_probs", getattr(row, "score_ref_logprobs", None))
        own = [kl(config.kl_estimator, lp, r) for lp, r in zip(row.score_logprobs, ref, strict=True)] if ref else []
        kls += own
        if isinstance(row.behavior_log_probs, list):
            if hasattr(row, "advantages"):
                advantages = row.advantages if isinstance(row.advantages, list) else [row.advantages] * row.n
            elif isinstance(row.rewards, list):
                advantages = [math.fsum(row.rewards[t:]) for t in range(row.n)]
            else:
                advantages = [row.rewards] * row.n
            here = [math.exp(lp - b) for lp, b in zip(row.score_logprobs, row.behavior_log_probs, strict=True)]
            kl_terms += own
        else:
            number = row.advantages if hasattr(row, "advantages") else row.rewards
            advantages = [math.fsum(number) if isinstance(number, list) else number]
            here = [math.exp(math.fsum(row.score_logprobs) - row.behavior_log_probs)]
            kl_terms.append(math.fsum(own))
        ratios += here
        advantages_all += advantages
        losses += [-min(r, config.clip_ratio) * a for r, a in zip(here, advantages, strict=True)]
    policy = mean(losses)
    return policy + (config.beta * mean(kl_terms) if kls else 0.0), {
        "policy_loss": policy,
        "is_ratio_mean": mean(ratios),
        "is_ratio_max": max(ratios),
        "is_ratio_min": min(ratios),
        "clipped_fraction": mean([float(r > config.clip_ratio) for r in ratios]),
        "kl_divergence": mean(kls),
        "advantage_mean": mean(advantages_all),
        "reward_mean": mean(totals),
        **sampler_figures((row for [row] in examples), "behavior_log_probs"),
        "loss:sum": math.nan,
    }


def log_ratios(sequence: SimpleNamespace) -> tuple[float, float]:
    """A response's log-probability and its log-ratio to the reference."""
    ref = getattr(sequence, "ref_log_probs", getattr(sequence, "score_ref_logprobs", None))
    logprob = math.fsum(sequence.score_logprobs)
    return logprob, logprob - (math.fsum(ref) if isinstance(ref, list) else ref)


def dpo(examples: Examples, config: Any) -> Result:
    losses, chosen, rejected, chosen_lp, rejected_lp = [], [], [], [], []
    for c, w in examples:
        if not (c.n and w.n):
            continue
        (lp_c, ratio_c), (lp_w, ratio_w) = log_ratios(c), log_ratios(w)
        z = config.beta * (ratio_c - ratio_w)
        losses.append(-(1 - config.label_smoothing) * log_sigmoid(z) - config.label_smoothing * log_sigmoid(-z))
        chosen.append(config.beta * ratio_c)
        rejected.append(config.beta * ratio_w)
        chosen_lp.append(lp_c)
        rejected_lp.append(lp_w)
    return mean(losses), {
        "implicit_reward": mean(chosen + rejected),
        "chosen_reward": mean(chosen),
        "rejected_reward": mean(rejected),
        "reward_margin": mean(chosen) - mean(rejected),
        "preference_accuracy": mean([float(c > w) for c, w in zip(chosen, rejected, strict=True)]),
        "chosen_log_probs": mean(chosen_lp),
        "rejected_log_probs": mean(rejected_lp),
        "num_pairs": len(losses),
    }


def reward_modeling(examples: Examples, config: Any) -> Result:
    chosen, rejected = [c.score_rewards for c, _ in examples], [w.score_rewards for _, w in examples]
    losses = []
    for c, w in examples:
        margin = config.margin + getattr(c, "margin", 0.0)
        losses.append(
            -log_sigmoid((c.score_rewards - w.score_rewards - margin) / config.temperature)
            + config.center_coef * (c.score_rewards + w.score_rewards) ** 2
        )
    return mean(losses), {
        "preference_accuracy": mean([float(c > w) for c, w in zip(chosen, rejected, strict=True)]),
        "reward_margin": mean([c - w for c, w in zip(chosen, rejected, strict=True)]),
        "chosen_reward_mean": mean(chosen),
        "rejected_reward_mean": mean(rejected),
        "chosen_reward_std": std(chosen),
        "rejected_reward_std": std(rejected),
        "num_pairs": len(losses),
    }
