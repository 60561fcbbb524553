"""Policy-gradient and distillation losses written out in float64 Python loops from their papers and documentation."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from support.loss_references import (
    Examples,
    Result,
    gae,
    kl,
    mean,
    reduce,
    rejected,
    sampler_figures,
    shaped_rewards,
    std,
    surrogate,
    variance,
    zero_if_nan,
)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def reference_of(row: SimpleNamespace) -> list[float] | None:
    found: list[float] | None = getattr(row, "ref_log_probs", getattr(row, "score_ref_logprobs", None))
    return found


# ------------------------------------------------------------------ Tinker's convention


def cross_entropy(examples: Examples, config: Any) -> Result:
    losses: list[list[float]] = []
    weight, counted = 0.0, 0
    for [row] in examples:
        losses.append([])
        for t in range(row.n):
            many = hasattr(row, "score_candidate_logprobs")
            logprobs = row.score_candidate_logprobs[t] if many else [row.score_logprobs[t]]
            weights = row.weights[t] if many else [row.weights[t]]
            if any(weights):
                losses[-1].append(-math.fsum(w * lp for w, lp in zip(weights, logprobs, strict=True) if w))
            weight += math.fsum(weights)
            counted += sum(w != 0 for w in weights)
    total = math.fsum(loss for row in losses for loss in row)
    metrics = {"loss:sum": total, "nll": total / weight if weight else math.nan, "num_tokens": counted}
    return reduce(losses, config), metrics


def tinker_policy(name: str) -> Any:
    def reference(examples: Examples, config: Any) -> Result:
        losses, ratios, clips, kls = [], [], [], []
        for [row] in examples:
            losses.append([])
            differences = [lp - old for lp, old in zip(row.score_logprobs, row.logprobs, strict=True)]
            counted = [bool(m) for m in getattr(row, "sequence_ratio_mask", [1] * row.n)]
            inside = [d for d, m in zip(differences, counted, strict=True) if m]
            sequence = math.exp(math.fsum(inside) / max(1, len(inside)))
            for t in range(row.n):
                lp, a = row.score_logprobs[t], row.advantages[t]
                r = sequence if name == "gspo" else math.exp(differences[t])
                ratios.append(r)
                kls.append(math.exp(differences[t]) - 1 - differences[t])
                if name == "dro":
                    losses[-1].append(config.beta / 2 * differences[t] ** 2 - lp * a)
                    clips.append(0.0)
                elif name == "cispo":
                    bounded = clip(r, config.clip_low_threshold, config.clip_high_threshold)
                    losses[-1].append(-bounded * a * lp)
                    clips.append(float(bounded != r))
                else:
                    loss, active = surrogate(r, a, config.clip_low_threshold, config.clip_high_threshold, None)
                    losses[-1].append(loss)
                    clips.append(float(active))
        return reduce(losses, config), {
            "loss:sum": math.fsum(loss for row in losses for loss in row),
            "ratio_mean": mean(ratios),
            "ratio_max": max(ratios),
            "clip_fraction": mean(clips),
            "approx_kl": mean(kls),
            **sampler_figures((row for [row] in examples), "logprobs"),
        }

    return reference


def importance_sum(examples: Examples, config: Any) -> Result:
    """The plain sum, used where the call names no reduction."""
    bound = math.inf if config.clip_ratio is None else config.clip_ratio
    rows = [
        [(math.exp(lp - old), a) for lp, old, a in zip(row.score_logprobs, row.logprobs, row.advantages, strict=True)]
        for [row] in examples
    ]
    losses = [[-min(r, bound) * a for r, a in row] for row in rows]
    pairs = [pair for row in rows for pair in row]
    ratios = [r for r, _ in pairs]
    total = math.fsum(loss for row in losses for loss in row)
    loss = reduce(losses, config) if "reduction" in config.model_fields_set else total
    return loss, {
        "policy_loss": loss,
        "loss:sum": total,
        "is_ratio_mean": mean(ratios),
        "is_ratio_max": max(ratios),
        "is_ratio_min": min(ratios),
        "clipped_fraction": mean([float(r > bound) for r in ratios]),
        "kl_divergence": math.nan,
        "advantage_mean": mean([a for _, a in pairs]),
        "reward_mean": math.nan,
        **sampler_figures((row for [row] in examples), "logprobs"),
    }


# ------------------------------------------------------------------ groups


def quantile(values: list[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def group_figures(rewards: list[float], lengths: list[int], config: Any, batch_std: float) -> list[float]:
    """Advantages of one group."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    if config.baseline == "leave_one_out":
        baselines = [(total - r) / (len(rewards) - 1) for r in rewards]
    elif config.baseline == "length_weighted":
        weighted = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True))
        baselines = [weighted / max(1, sum(lengths))] * len(rewards)
    else:
        baselines = [mean(rewards)] * len(rewards)
    scale = 1.0
    if config.scale_rewards == "batch":
        scale = batch_std + config.scale_epsilon
    elif config.scale_rewards:
        scale = std(rewards) + config.scale_epsilon
    return [(r - b) / scale for r, b in zip(rewards, baselines, strict=True)]


def old_of(sample: SimpleNamespace) -> list[float]:
    found: list[float] = getattr(sample, "old_log_probs", sample.score_logprobs)
    return found


def sample_losses(
    sample: SimpleNamespace, advantages: list[float], uncertain: list[bool], config: Any
) -> tuple[list[float], list[bool]]:
    """The surrogate of each token of a response, and the clipped tokens."""
    low = config.clip_epsilon
    high = low if config.clip_epsilon_high is None else config.clip_epsilon_high
    old, losses, clips = old_of(sample), [], []
    differences = [lp - o for lp, o in zip(sample.score_logprobs, old, strict=True)]
    whole = math.fsum(differences)
    if config.surrogate == "gmpo":
        bounded = [min(d, high) if a > 0 else max(d, -low) for d, a in zip(differences, advantages, strict=True)]
        counted = [b for b, on in zip(bounded, uncertain, strict=True) if on]
        value = math.exp(math.fsum(counted) / max(1, len(counted)))
        return [-value * a for a in advantages], [b != d for b, d in zip(bounded, differences, strict=True)]
    for lp, d, a in zip(sample.score_logprobs, differences, advantages, strict=True):
        ratio = {
            "token": lambda d=d: math.exp(d),
            "sequence": lambda: math.exp(whole / sample.n),
            "sequence_token": lambda: math.exp(whole / sample.n),
            "trajectory": lambda: math.exp(whole),
        }[config.importance]()
        active = False
        if config.surrogate == "reinforce":
            loss = -a * lp
        elif config.surrogate == "cispo":
            weight = clip(ratio, config.ratio_min, config.ratio_max)
            loss, active = -weight * a * lp, weight != ratio
        elif config.surrogate == "sapo":
            tau = config.sapo_temperature_pos if a > 0 else config.sapo_temperature_neg
            loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
        else:
            loss, active = surrogate(ratio, a, 1 - low, 1 + high, config.dual_clip)
        losses.append(loss)
        clips.append(active)
    return losses, clips


def covariances(samples: list[SimpleNamespace], advantages: list[list[float]]) -> list[list[float]]:
    """``(A - mean A)(log p - mean log p)`` of every token of the batch."""
    logprobs = [lp for sample in samples for lp in sample.score_logprobs]
    everything = [a for own in advantages for a in own]
    a_mean, lp_mean = zero_if_nan(mean(everything)), zero_if_nan(mean(logprobs))
    return [
        [(a - a_mean) * (lp - lp_mean) for a, lp in zip(own, sample.score_logprobs, strict=True)]
        for own, sample in zip(advantages, samples, strict=True)
    ]


def special_losses(
    samples: list[SimpleNamespace], advantages: list[list[float]], config: Any
) -> list[tuple[list[float], list[bool]]] | None:
    """The losses of VESPO, TOPR, DPPO, Clip-Cov and KL-Cov for each response; None for any other surrogate.

    A batch in which Clip-Cov would have to draw at random has no reference."""
    if config.surrogate not in ("vespo", "topr", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"):
        return None
    low = config.clip_epsilon
    high = low if config.clip_epsilon_high is None else config.clip_epsilon_high
    covs = covariances(samples, advantages)
    ranked = sorted((c for own in covs for c in own), reverse=True)
    threshold = ranked[max(1, int(len(ranked) * config.cov_share)) - 1] if ranked else math.inf
    found = []
    for sample, own, cov in zip(samples, advantages, covs, strict=True):
        losses, clips = [], []
        old = old_of(sample)
        log_w = clip(
            math.fsum(clip(lp - o, -20, 20) for lp, o in zip(sample.score_logprobs, old, strict=True)),
            math.log(1e-8),
            20,
        )
        for lp, o, a, c in zip(sample.score_logprobs, old, own, cov, strict=True):
            p, q, ratio = math.exp(lp), math.exp(o), math.exp(lp - o)
            if config.surrogate == "vespo":
                k, rate = (
                    (config.vespo_k_pos, config.vespo_lambda_pos)
                    if a >= 0
                    else (config.vespo_k_neg, config.vespo_lambda_neg)
                )
                loss, active = -math.exp(rate + k * log_w - rate * math.exp(log_w)) * a * lp, False
            elif config.surrogate == "topr":
                product = math.prod(math.exp(x - y) for x, y in zip(sample.score_logprobs, old, strict=True))
                loss, active = -(min(product, 1.0) if a < 0 else 1.0) * a * lp, a < 0 and product > 1
            elif config.surrogate.startswith("dppo"):
                if config.surrogate == "dppo_tv":
                    active = p - q > high if a > 0 else q - p > low
                else:
                    moved = q * (o - lp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
                    active = (moved > high and p > q) if a > 0 else (moved > low and p < q)
                loss = 0.0 if active else -min(ratio, config.ratio_max) * a * lp
            elif config.surrogate == "kl_cov":
                active = c >= threshold
                loss = -ratio * a + (config.kl_cov_coef * abs(lp - o) if active else 0.0)
            else:
                loss, clipped = surrogate(ratio, a, 1 - low, 1 + high, config.dual_clip)
                active = config.cov_min < c < config.cov_max and not clipped
                loss = 0.0 if active else loss
            losses.append(loss)
            clips.append(active)
        found.append((losses, clips))
    return found


def sampler_weights(sample: SimpleNamespace, config: Any) -> list[float] | None:
    if config.sampler_correction is None:
        return None
    differences = [o - s for o, s in zip(old_of(sample), sample.sampler_log_probs, strict=True)]
    level, action = config.sampler_correction.split("_")
    if level == "sequence":
        differences = [math.fsum(differences)] * sample.n
    low, high = config.sampler_ratio_min, config.sampler_ratio_max
    weights = [math.exp(d) for d in differences]
    if action == "truncate":
        return [clip(w, low, high) for w in weights]
    return [w if low <= w <= high else 0.0 for w in weights]


def all_sampler_weights(samples: list[SimpleNamespace], config: Any) -> list[list[float] | None]:
    """Each response's weights, divided by their mean over all tokens or all responses, as the arguments say."""
    found = [sampler_weights(sample, config) for sample in samples]
    if not (config.sampler_correction and config.sampler_normalize):
        return found
    per_token = config.sampler_correction.startswith("token")
    counted = [w for own in found if own for w in (own if per_token else own[:1])]
    centre = math.fsum(counted) / len(counted)
    return [own and [w / centre for w in own] for own in found]


def groups(examples: Examples, config: Any, given: list[list[float]] | None = None) -> Result:
    """``given``: advantages of each response's tokens, where they are not the rewards'."""
    samples = [sample for group in examples for sample in group]
    rewarded = hasattr(samples[0], "rewards")
    for sample in samples if not rewarded else ():
        sample.rewards = math.nan
    kl_in_reward = config.kl_in_reward and reference_of(samples[0]) is not None
    rewards = []
    for group in examples:
        rewards.append([])
        for sample in group:
            taken = 0.0
            if kl_in_reward:
                pairs = zip(old_of(sample), reference_of(sample) or [], strict=True)
                taken = config.beta * math.fsum(kl(config.kl_estimator, o, f) for o, f in pairs)
            rewards[-1].append(sample.rewards - taken)
    batch_std = std([r for group in rewards for r in group])
    per_response = [
        advantage
        for group, own in zip(examples, rewards, strict=True)
        for advantage in group_figures(own, [sample.n for sample in group], config, batch_std)
    ]
    reported = per_response
    advantages = [[a] * sample.n for a, sample in zip(per_response, samples, strict=True)]
    if config.whiten_advantages:
        everything = [a for own in advantages for a in own]
        centre, scale = zero_if_nan(mean(everything)), math.sqrt(variance(everything) + 1e-8)
        advantages = [[(a - centre) / scale for a in own] for own in advantages]
    if given is not None:
        advantages, reported = given, [a for own in given for a in own]
    elif hasattr(samples[0], "advantages"):
        by_token = isinstance(samples[0].advantages, list)
        advantages = [s.advantages if by_token else [s.advantages] * s.n for s in samples]
        reported = [a for own in advantages for a in own] if by_token else [s.advantages for s in samples]

    if hasattr(samples[0], "planning_mask"):
        advantages = [
            [a + config.planning_alpha * abs(a) if p else a for a, p in zip(own, s.planning_mask, strict=True)]
            for own, s in zip(advantages, samples, strict=True)
        ]

    if config.advantage_scale is not None and given is None and not hasattr(samples[0], "advantages"):
        counted = [
            len(set(own)) > 1 if config.advantage_scale == "spread" else reward != 0
            for own in rewards
            for reward in own
        ]
        alpha = len(counted) / max(1, sum(counted))
        advantages = [[a * alpha for a in own] for own in advantages]
        reported = [a * alpha for a in reported]
    special = special_losses(samples, advantages, config)
    threshold = -math.inf
    if config.top_entropy_quantile < 1:
        threshold = quantile([h for s in samples for h in s.score_entropy], 1 - config.top_entropy_quantile)
    differs = [len({sample.rewards for sample in group}) > 1 for group in examples]
    surrogates, kls, entropies, approx, clips, weights_all, kept_tokens = [], [], [], [], [], [], []
    every_kl: list[float] = []
    all_weights = all_sampler_weights(samples, config)
    place = 0
    for group, differ in zip(examples, differs, strict=True):
        for sample in group:
            uncertain = [h >= threshold for h in sample.score_entropy]
            if special is None:
                losses, active = sample_losses(sample, advantages[place], uncertain, config)
            else:
                losses, active = special[place]
            weights = all_weights[place]
            place += 1
            weights_all += weights or []
            losses = [
                x * (weights[t] if weights else 1.0) * float(uncertain[t] or config.surrogate == "gmpo")
                for t, x in enumerate(losses)
            ]
            ref, old = reference_of(sample), old_of(sample)
            divergences = [
                kl(config.kl_estimator.rstrip("+"), lp, f)
                for lp, f in zip(sample.score_logprobs, ref or old, strict=True)
            ]
            kept = not (config.mask_zero_spread and not differ and not hasattr(sample, "advantages"))
            kept = kept and not (config.mask_truncated and getattr(sample, "truncated", 0))
            kept = kept and not rejected(sample, config)
            for into, part in zip(
                (surrogates, kls, entropies), (losses, divergences, sample.score_entropy), strict=True
            ):
                into.append(part if kept else [])
            kept_tokens += [float(kept)] * sample.n
            every_kl += divergences
            if config.use_bias_correction_kl:
                corrected = zip(divergences, sample.score_logprobs, old, strict=True)
                kls[-1] = [d * math.exp(lp - o) for d, lp, o in corrected] if kept else []
            approx += [math.exp(lp - o) - 1 - (lp - o) for lp, o in zip(sample.score_logprobs, old, strict=True)]
            clips += [float(c) for c in active]
    policy = reduce(surrogates, config)
    loss = policy - config.entropy_coef * reduce(entropies, config)
    if reference_of(samples[0]) is not None and not config.kl_in_reward:
        loss += config.beta * reduce(kls, config)
    raw = [[sample.rewards for sample in group] for group in examples]
    return loss, {
        "policy_loss": policy,
        "entropy": mean([h for s in samples for h in s.score_entropy]),
        "kl_divergence": mean(every_kl),
        "approx_kl": mean(approx),
        "clip_fraction": mean(clips),
        "advantage_mean": mean(reported),
        "advantage_std": std(reported),
        "reward_mean": mean([r for group in raw for r in group]),
        "group_reward_mean": mean([mean(group) for group in raw]),
        "group_reward_std": mean([std(group) if len(set(group)) > 1 else 0.0 for group in raw])
        if rewarded
        else math.nan,
        "zero_spread_groups": mean([float(not differ) for differ in differs]) if rewarded else math.nan,
        "kept_fraction": mean(kept_tokens),
        "sampler_ratio_mean": mean(weights_all),
        **sampler_figures(samples),
        "planning_fraction": mean([float(p) for s in samples for p in getattr(s, "planning_mask", [])]),
    }


def normalised(values: list[float], scale: bool) -> list[float]:
    if len(set(values)) < 2:
        return [0.0] * len(values)
    return [(v - mean(values)) / (std(values) + 1e-4 if scale else 1.0) for v in values]


def gigpo(examples: Examples, config: Any) -> Result:
    if hasattr(examples[0][0], "advantages"):
        loss, metrics = groups(examples, config)
        return loss, metrics | {"singleton_steps": math.nan}
    given, alone = [], []
    for group in examples:
        episode_level = normalised([sample.rewards for sample in group], bool(config.scale_rewards))
        steps: list[SimpleNamespace] = []
        for index, sample in enumerate(group):
            own: list[SimpleNamespace] = []
            for t in range(sample.n):
                if not t or sample.step_ids[t] != sample.step_ids[t - 1]:
                    own.append(SimpleNamespace(episode=index, state=sample.anchor_ids[t], tokens=0, reward=0.0))
                own[-1].tokens += 1
                own[-1].reward += sample.step_rewards[t] if hasattr(sample, "step_rewards") else 0.0
            if own and not hasattr(sample, "step_rewards"):
                own[-1].reward = sample.rewards
            for k, step in enumerate(own):
                step.value = math.fsum(config.gamma ** (u - k) * own[u].reward for u in range(k, len(own)))
            steps += own
        by_state = defaultdict(list)
        for step in steps:
            by_state[step.state].append(step)
        for members in by_state.values():
            for step, level in zip(
                members, normalised([step.value for step in members], bool(config.scale_rewards)), strict=True
            ):
                step.level = level
                alone.append(float(len(members) == 1))
        for index in range(len(group)):
            given.append(
                [
                    episode_level[index] + config.step_weight * step.level
                    for step in steps
                    if step.episode == index
                    for _ in range(step.tokens)
                ]
            )
    loss, metrics = groups(examples, config, given)
    return loss, metrics | {"singleton_steps": mean(alone)}


# ------------------------------------------------------------------ rows


def reinforce(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples]
    kept = []
    for row in rows:
        ref, old = reference_of(row), old_of(row)
        rewards = row.rewards if isinstance(row.rewards, list) else [0.0] * (row.n - 1) + [row.rewards] if row.n else []
        shaped = [r - (config.beta * (old[t] - ref[t]) if ref else 0.0) for t, r in enumerate(rewards)]
        returns = [math.fsum(config.gamma ** (u - t) * shaped[u] for u in range(t, row.n)) for t in range(row.n)]
        baseline = config.baseline + getattr(row, "greedy_rewards", 0.0)
        kept.append((row, ref, old, rewards, returns, [g - baseline for g in returns]))
    everything = [a for *_, advantages in kept for a in advantages]
    centre, scale = 0.0, 1.0
    if config.whiten_advantages:
        centre, scale = zero_if_nan(mean(everything)), math.sqrt(variance(everything) + 1e-8)
    epsilon = getattr(config, "clip_epsilon", None)
    surrogates, kls, approx, clips = [], [], [], []
    for row, ref, old, _, _, advantages in kept:
        losses = []
        for t in range(row.n):
            lp, a = row.score_logprobs[t], (advantages[t] - centre) / scale
            loss, active = -a * lp, False
            if epsilon is not None:
                loss, active = surrogate(math.exp(lp - old[t]), a, 1 - epsilon, 1 + epsilon, None)
            losses.append(loss)
            clips.append(float(active))
            kls.append(kl("k3", lp, (ref or old)[t]))
            approx.append(math.exp(lp - old[t]) - 1 - (lp - old[t]))
        surrogates.append(losses)
    policy = reduce(surrogates, config)
    return policy - config.entropy_coef * reduce([row.score_entropy for row in rows], config), {
        "policy_loss": policy,
        "entropy": mean([h for row in rows for h in row.score_entropy]),
        "kl_divergence": mean(kls),
        "approx_kl": mean(approx),
        "clip_fraction": mean(clips),
        "advantage_mean": mean(everything),
        "advantage_std": std(everything),
        "return_mean": mean([g for *_, returns, _ in kept for g in returns]),
        "reward_mean": mean([math.fsum(rewards) for row, _, _, rewards, _, _ in kept if row.n]),
        **sampler_figures(rows),
    }


def value_only(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples]
    everything = [r for row in rows for r in shaped_rewards(row, config)]
    centre, spread = 0.0, 1.0
    if config.whiten_rewards:
        centre, spread = zero_if_nan(mean(everything)), math.sqrt(variance(everything) + 1e-8)
    losses, targets, baselines, totals = [], [], [], []
    for row in rows:
        baseline = getattr(row, "old_values", row.score_values)
        rewards = [(r - centre) / spread + centre for r in shaped_rewards(row, config)]
        lam = config.gae_lambda if config.use_gae else 1.0
        advantages = gae(rewards, baseline, config.gamma, lam, getattr(row, "bootstrap_values", 0.0))
        own = []
        for v, b, a in zip(row.score_values, baseline, advantages, strict=True):
            error = (v - a - b) ** 2
            if config.clip_value_loss and config.value_clip_epsilon is not None:
                near = b + clip(v - b, -config.value_clip_epsilon, config.value_clip_epsilon)
                error = max(error, (near - a - b) ** 2)
            own.append(error / 2)
        losses.append(own)
        targets += [a + b for a, b in zip(advantages, baseline, strict=True)]
        baselines += baseline
        if row.n:
            totals.append(math.fsum(shaped_rewards(row, config)))
    loss = reduce(losses, config)
    residuals = [r - b for r, b in zip(targets, baselines, strict=True)]
    return loss, {
        "value_loss": loss,
        "explained_variance": 1 - variance(residuals) / (variance(targets) + 1e-5),
        "value_mean": mean([v for row in rows for v in row.score_values]),
        "return_mean": mean(targets),
        "reward_mean": mean(totals),
    }


# ------------------------------------------------------------------ distillation


def gkd(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples]
    everything = [x for row in rows for x in row.score_divergence]
    return reduce([row.score_divergence for row in rows], config), {
        "divergence": mean(everything),
        "nll": -mean([lp for row in rows for lp in row.score_logprobs]),
        "num_tokens": len(everything),
    }


def on_policy_distillation(examples: Examples, config: Any) -> Result:
    losses, kls, advantages_all, ratios, approx = [], [], [], [], []
    for [row] in examples:
        old, teacher = old_of(row), reference_of(row)
        assert teacher is not None
        reverse = [o - f for o, f in zip(old, teacher, strict=True)]
        advantages = [
            math.fsum(
                -config.kl_coef * (config.gamma ** (u - t) if u > t else 1.0) * reverse[u] for u in range(t, row.n)
            )
            for t in range(row.n)
        ]
        own = [math.exp(lp - o) for lp, o in zip(row.score_logprobs, old, strict=True)]
        losses.append([-r * a for r, a in zip(own, advantages, strict=True)])
        kls += reverse
        advantages_all += advantages
        ratios += own
        approx += [r - 1 - math.log(r) for r in own]
    policy = reduce(losses, config)
    return policy, {
        "policy_loss": policy,
        "reverse_kl": mean(kls),
        "advantage_mean": mean(advantages_all),
        "ratio_mean": mean(ratios),
        "approx_kl": mean(approx),
        "num_tokens": len(kls),
        **sampler_figures(row for [row] in examples),
    }


def top_k_distillation(examples: Examples, config: Any) -> Result:
    losses, masses, student_masses = [], [], []
    for [row] in examples:
        own = []
        for teacher, student in zip(row.teacher_log_probs, row.score_candidate_logprobs, strict=True):
            q, p = [math.exp(x) for x in teacher], [math.exp(x) for x in student]
            if config.tail == "renormalise":
                q = [x / math.fsum(q) for x in q]
            loss = math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(q, p, strict=True))
            if config.tail == "bucket":
                rest, student_rest = 1 - math.fsum(q), 1 - math.fsum(p)
                loss += rest * (math.log(rest) - math.log(student_rest))
            own.append(loss)
            masses.append(math.fsum(q))
            student_masses.append(math.fsum(p))
        losses.append(own)
    return reduce(losses, config), {
        "divergence": mean([x for own in losses for x in own]),
        "teacher_mass": mean(masses),
        "student_mass": mean(student_masses),
        "num_tokens": len(masses),
    }
