"""Metrics of policies, distillation and supervised losses in numpy, each from its sentence in the documentation.

``T`` scored tokens, ``S`` sequences. A function takes a drawn batch and gives the figures that its loss is to return.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.losses import PER_SEQUENCE, Drawn, flat

Array = np.ndarray
Figures = dict[str, float]
NAN = math.nan


class View:
    """Sequences as arrays; ``n [S]`` are their scored tokens, ``own [T]`` the sequence of each token."""

    def __init__(self, sequences: list[SimpleNamespace], config: Any) -> None:
        self.rows, self.config = sequences, config
        self.n = np.array([row.n for row in sequences])
        self.own = np.repeat(np.arange(len(self.n)), self.n)

    def __getitem__(self, name: str) -> Array:
        """``[T, ...]`` where each token has its own number, else ``[S, ...]``."""
        values = [getattr(row, name) for row in self.rows]
        whole = name.startswith("score_") and name.removeprefix("score_") in PER_SEQUENCE
        by_token = isinstance(values[0], list) and not whole
        return np.array([entry for row in values for entry in row] if by_token else values, float)

    def total(self, of_tokens: Array) -> Array:
        """``[T] -> [S]``."""
        return np.bincount(self.own, of_tokens, len(self.n))

    def average(self, of_tokens: Array, kept: Array | None = None) -> float:
        """The mean that ``reduction`` names, over the sequences kept."""
        there = (self.n > 0) if kept is None else (self.n > 0) & kept
        sums, n, config = self.total(of_tokens)[there], self.n[there], self.config
        return {
            "token_mean": sums.sum() / n.sum(),
            "sequence_mean": (sums / n).mean(),
            "sequence_mean_token_sum": sums.mean(),
            "fixed": sums.mean() / (config.reduction_divisor or NAN),
            "sum": sums.sum(),
        }[config.reduction]

    def summed(self, rewards: Array, values: Array, gamma: float, lam: float, last: Array) -> Array:
        """``[T]``: generalised advantages, from each sequence's end to its beginning."""
        found, at = np.zeros(len(rewards)), 0
        for n, following in zip(self.n, last, strict=True):
            running = 0.0
            for t in range(at + n - 1, at - 1, -1):
                running = rewards[t] + gamma * following - values[t] + gamma * lam * running
                found[t], following = running, values[t]
            at += n
        return found

    def to_go(self, rewards: Array, gamma: float) -> Array:
        return self.summed(rewards, 0 * rewards, gamma, 1.0, np.zeros(len(self.n)))

    def at_end(self, of_rows: Array) -> Array:
        found = np.zeros(len(self.own))
        found[(np.cumsum(self.n) - 1)[self.n > 0]] = of_rows[self.n > 0]
        return found


def std(x: Array) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0


def k3(p: Array, q: Array) -> Array:
    """KL(p || q) at tokens of p."""
    return np.exp(q - p) - 1 - (q - p)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def log_odds(m: Array) -> Array:
    return np.log(np.exp(m) / (1 - np.exp(m)))


def clipped(ratio: Array, a: Array, low: float, high: float) -> tuple[Array, Array]:
    """PPO's loss of each token, and where the bound decides it."""
    bounded = np.clip(ratio, low, high)
    return np.maximum(-ratio * a, -bounded * a), bounded * a < ratio * a


def sampler(of_sampler: Array, of_trainer: Array) -> Figures:
    return {
        "sampler_kl": k3(of_sampler, of_trainer).mean(),
        "sampler_logprob_diff": (of_trainer - of_sampler).mean(),
        "sampler_logprob_diff_max": abs(of_trainer - of_sampler).max(),
    }


def policy(v: View) -> Figures:
    """What losses of a policy with a reference and a sampler share."""
    lp, old, ref = v["score_logprobs"], v["old_log_probs"], v["ref_log_probs"]
    estimator = getattr(v.config, "kl_estimator", "k3")
    return {
        "entropy": v["score_entropy"].mean(),
        "kl_divergence": {"k1": lp - ref, "k2": (lp - ref) ** 2 / 2, "k3": k3(lp, ref)}[estimator].mean(),
        "approx_kl": k3(old, lp).mean(),
        **sampler(v["sampler_log_probs"], old),
    }


def far_from_sampler(v: View) -> Array:
    """``[S]`` bool: responses whose geometric mean of ratios is beyond sampler_rejection_max, either way."""
    mean = v.total(v["old_log_probs"] - v["sampler_log_probs"]) / np.maximum(v.n, 1)
    return abs(mean) > math.log(v.config.sampler_rejection_max)


def correction(v: View) -> Array:
    ratio = np.exp(v["old_log_probs"] - v["sampler_log_probs"])
    return np.clip(ratio, v.config.sampler_ratio_min, v.config.sampler_ratio_max)


CORRECTED = {
    "sampler_correction": "token_truncate", "sampler_ratio_min": 0.6, "sampler_ratio_max": 1.4,
    "sampler_rejection": "seq_mean_k1", "sampler_rejection_max": 1.5,
}  # fmt: skip


# ------------------------------------------------------------------ groups of responses

SCALED = {
    "grpo", "dapo", "group_gspo", "gspo_token", "gmpo", "sapo", "group_cispo", "vespo", "dppo_tv", "dppo_kl",
    "clip_cov", "kl_cov",
}  # fmt: skip
UNCLIPPED = {"sapo", "vespo", "gpg", "dro", "reinforce", "remax"}


def group_rewards(v: View, drawn: Drawn) -> list[Array]:
    ends = np.cumsum([len(group) for group in drawn.examples()])[:-1]
    return np.split(v["rewards"], ends)


def group_advantages(loss: str, v: View, drawn: Drawn) -> Array:
    """``[S]``, as the formula of each loss has it."""
    groups = group_rewards(v, drawn)
    ends = np.cumsum([len(group) for group in groups])[:-1]
    taken = v.config.beta * v.total(v["old_log_probs"] - v["ref_log_probs"]) if loss == "rloo" else 0 * v["rewards"]
    found = []
    for rewards, n in zip(np.split(v["rewards"] - taken, ends), np.split(v.n, ends), strict=True):
        if len(set(rewards)) < 2:
            found.append(0 * rewards)
        elif loss == "rloo":
            found.append(rewards - (rewards.sum() - rewards) / (len(rewards) - 1))
        elif loss == "opo":
            found.append(rewards - (n * rewards).sum() / n.sum())
        else:
            found.append((rewards - rewards.mean()) / (std(rewards) + 1e-4 if loss in SCALED else 1))
    return np.concatenate(found)


def surrogate(loss: str, v: View, a: Array) -> tuple[Array, Array]:
    """``[T], [T] bool``: each token's loss, and what clip_fraction counts."""
    c, lp, old, w = v.config, v["score_logprobs"], v["old_log_probs"], correction(v)
    d = lp - old
    r, whole, mean = np.exp(d), v.total(d)[v.own], (v.total(d) / np.maximum(v.n, 1))[v.own]
    none, low, high = np.zeros(len(d), bool), c.clip_epsilon, c.clip_epsilon_high or c.clip_epsilon
    covariance = (a - a.mean()) * (lp - lp.mean())
    if loss == "gpg":
        losses, active = -a * lp, none
    elif loss == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        losses, active = -4 / tau * sigmoid(tau * (r - 1)) * a, none
    elif loss == "gmpo":
        bounded = np.where(a > 0, np.minimum(d, high), np.maximum(d, -low))
        losses, active = -np.exp((v.total(bounded) / np.maximum(v.n, 1))[v.own]) * a, bounded != d
    elif loss == "group_cispo":
        losses, active = -np.minimum(r, c.ratio_max) * a * lp, r > c.ratio_max
    elif loss == "vespo":
        u = np.exp(v.total(d + np.log(w))[v.own])
        k, rate = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.0)
        return -np.exp(rate) * u**k * np.exp(-rate * u) * a * lp, none
    elif loss == "topr":
        losses = -np.where(a >= 0, 1.0, np.minimum(np.exp(whole), 1)) * a * lp
        active = (a < 0) & (whole > 0)
    elif loss.startswith("dppo"):
        p, q = np.exp(lp), np.exp(old)
        moved = (
            abs(p - q) if loss == "dppo_tv" else q * np.log(q / p) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        )
        active = np.where(a > 0, (moved > high) & (p > q), (moved > low) & (p < q))
        losses = np.where(active, 0, -np.minimum(r, c.ratio_max) * a * lp)
    elif loss == "kl_cov":
        active = covariance >= np.sort(covariance)[-int(len(d) * c.cov_share)]
        losses = -r * a + np.where(active, c.kl_cov_coef * abs(d), 0)
    else:
        ratio = {"group_gspo": np.exp(mean), "gspo_token": np.exp(mean), "rloo": np.exp(whole)}.get(loss, r)
        losses, active = clipped(ratio, a, 1 - low, 1 + high)
        if loss == "clip_cov":  # with a share of 1 nothing is left to chance
            active = (covariance > c.cov_min) & (covariance < c.cov_max) & ~active
            losses = np.where(active, 0, losses)
    return losses * w, active


def groups(drawn: Drawn, given: Array | None = None) -> Figures:
    v, loss = View(flat(drawn.examples()), drawn.config), drawn.spec.name
    of_groups = group_rewards(v, drawn)
    reported = group_advantages(loss, v, drawn) if given is None else given
    a = reported[v.own] if given is None else given
    if loss == "reinforce_plus_plus_baseline":
        a = (a - a.mean()) / math.sqrt(a.var(ddof=1) + 1e-8)
    a = np.where(v["planning_mask"] > 0, a + v.config.planning_alpha * abs(a), a)
    losses, active = surrogate(loss, v, a)
    kept = ~far_from_sampler(v) & (v["truncated"] == 0)
    if loss in ("dapo", "gpg"):
        kept &= np.concatenate([np.full(len(group), len(set(group)) > 1) for group in of_groups])
    return policy(v) | {
        "policy_loss": v.average(losses, kept),
        "clip_fraction": active.mean(),
        "advantage_mean": reported.mean(),
        "advantage_std": std(reported),
        "reward_mean": v["rewards"].mean(),
        "group_reward_mean": np.mean([group.mean() for group in of_groups]),
        "group_reward_std": np.mean([std(group) if len(set(group)) > 1 else 0 for group in of_groups]),
        "zero_spread_groups": np.mean([len(set(group)) < 2 for group in of_groups]),
        "kept_fraction": kept[v.own].mean(),
        "sampler_ratio_mean": correction(v).mean(),
        "planning_fraction": v["planning_mask"].mean(),
    }


def token_baseline(drawn: Drawn) -> Figures:
    """The baseline of a token: its group's rewards, weighted by the energies that responses have up to its place."""
    tail, found = drawn.spec.name.startswith("tir"), []
    for group in drawn.examples():
        places = [list(range(each.n)) if tail else each.positions for each in group]
        energies = []
        for each in group:
            v = View([each], drawn.config)
            own = 1 - 2 * np.exp(v["old_log_probs"]) + np.exp(v["score_collision"]) if each.n else np.zeros(0)
            energies.append(np.cumsum(own * correction(v) ** 2 if each.n else own))
        second = sorted(max(own, default=-1) for own in places)[-2] if len(group) > 1 else -1
        for each, own in zip(group, places, strict=True):
            for place in own:
                there = [
                    (o.rewards, e[p.index(place)])
                    for o, p, e in zip(group, places, energies, strict=True)
                    if place in p
                ]
                baseline = sum(r * e for r, e in there) / (sum(e for _, e in there) + 1e-8)
                alone = sum(o.n > 0 for o in group) == 1
                found.append(0 if alone else each.rewards - (baseline if place <= second else 0))
    return groups(drawn, np.array(found))


def normal(x: Array) -> Array:
    return (x - x.mean()) / (std(x) + 1e-4) if len(set(x)) > 1 else 0 * x


def gigpo(drawn: Drawn) -> Figures:
    found, alone = [], []
    for group in drawn.examples():
        episodes = normal(np.array([each.rewards for each in group]))
        steps, returns, states = [], [], []
        for each in group:
            runs = sorted(set(each.step_ids))
            gains = [sum(r for r, s in zip(each.step_rewards, each.step_ids, strict=True) if s == run) for run in runs]
            for k, run in enumerate(runs):
                returns.append(sum(drawn.config.gamma**j * gain for j, gain in enumerate(gains[k:])))
                states.append(each.anchor_ids[each.step_ids.index(run)])
            steps.append([runs.index(step) for step in each.step_ids])
        levels, states_ = np.zeros(len(returns)), np.array(states)
        for state in set(states):
            levels[states_ == state] = normal(np.array(returns)[states_ == state])
            alone += [float((states_ == state).sum() == 1)] * int((states_ == state).sum())
        first = 0
        for episode, own in zip(episodes, steps, strict=True):
            found += [episode + levels[first + step] for step in own]
            first += max(own, default=-1) + 1
    return groups(drawn, np.array(found)) | {"singleton_steps": np.mean(alone)}


# ------------------------------------------------------------------ rows of a policy


def critic(v: View, rewards: Array) -> tuple[Array, Figures]:
    """Advantages, and the figures of a critic that is clipped at 0.2."""
    c, old, now = v.config, v["old_values"], v["score_values"]
    advantages = v.summed(rewards, old, c.gamma, c.gae_lambda, v["bootstrap_values"])
    returns = advantages + old
    near = old + np.clip(now - old, -0.2, 0.2)
    return advantages, {
        "value_loss": v.average(np.maximum((now - returns) ** 2, (near - returns) ** 2) / 2),
        "explained_variance": 1 - (returns - old).var(ddof=1) / (returns.var(ddof=1) + 1e-5),
        "value_mean": now.mean(),
        "return_mean": returns.mean(),
        "reward_mean": v.total(rewards)[v.n > 0].mean(),
    }


def value_only(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    return critic(v, v.at_end(v["rewards"]))[1]


def ppo(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    c, every, gone = drawn.config, v.n.sum(), far_from_sampler(v)
    v = View([row for row, out in zip(v.rows, gone, strict=True) if not out], c)
    raw, of_critic = critic(v, v["rewards"])
    a = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)
    losses, active = clipped(np.exp(v["score_logprobs"] - v["old_log_probs"]), a, 0.8, 1.2)
    figures = policy(v) | of_critic
    kl, rows = figures["kl_divergence"], (v.n > 0).sum()
    figures |= {
        "policy_loss": v.average(losses * correction(v)),
        "clip_fraction": active.mean(),
        "advantage_mean": a.mean(),
        "advantage_std": std(a),
        "advantage_mean_raw": raw.mean(),
        "advantage_std_raw": std(raw),
        "kept_fraction": v.n.sum() / every,
        "sampler_ratio_mean": correction(v).mean(),
        "next_beta": c.beta * (1 + np.clip(kl / c.kl_target - 1, -0.2, 0.2) * rows / c.kl_horizon),
    }
    if drawn.spec.name == "enhanced_ppo":
        return figures
    excess = max(0.0, kl - c.max_kl_divergence)
    return figures | {
        "kl_violation": float(kl > c.max_kl_divergence),
        "kl_excess": excess,
        "kl_penalty": c.conservative_coef * excess**2,
        "max_kl_threshold": c.max_kl_divergence,
    }


def reinforce(drawn: Drawn) -> Figures:
    v, c = View(flat(drawn.examples()), drawn.config), drawn.config
    lp, old = v["score_logprobs"], v["old_log_probs"]
    returns = v.to_go(v.at_end(v["rewards"]) - c.beta * (old - v["ref_log_probs"]), c.gamma)
    a = returns - c.baseline - (v["greedy_rewards"][v.own] if drawn.spec.name == "remax" else 0)
    weight = (a - a.mean()) / math.sqrt(a.var(ddof=1) + 1e-8) if c.whiten_advantages else a
    losses, active = -weight * lp, np.zeros(len(lp))
    if drawn.spec.name == "reinforce_plus_plus":
        losses, active = clipped(np.exp(lp - old), weight, 0.8, 1.2)
    return policy(v) | {
        "policy_loss": v.average(losses),
        "clip_fraction": active.mean(),
        "advantage_mean": a.mean(),
        "advantage_std": std(a),
        "return_mean": returns.mean(),
        "reward_mean": v["rewards"][v.n > 0].mean(),
    }


def tinker(drawn: Drawn) -> Figures:
    v, c, loss = View(flat(drawn.examples()), drawn.config), drawn.config, drawn.spec.name
    lp, old, a = v["score_logprobs"], v["logprobs"], v["advantages"]
    there = (old != 0) | (a != 0)
    ratio, active = np.exp(lp - old), np.zeros(len(lp))
    if loss == "gspo":
        ratio = np.exp(v.total((lp - old) * there) / np.maximum(v.total(there.astype(float)), 1))[v.own]
    if loss == "dro":
        losses = -(a * lp - c.beta / 2 * (lp - old) ** 2)
    elif loss == "cispo":
        bounded = np.clip(ratio, c.clip_low_threshold, c.clip_high_threshold)
        losses, active = -bounded * a * lp, bounded != ratio
    else:
        losses, active = clipped(ratio, a, c.clip_low_threshold, c.clip_high_threshold)
    return {
        "loss:sum": losses[there].sum(),
        "ratio_mean": ratio[there].mean(),
        "ratio_max": ratio[there].max(),
        "clip_fraction": active[there].mean(),
        "approx_kl": k3(old, lp)[there].mean(),
        **sampler(old[there], lp[there]),
    }


def importance(drawn: Drawn) -> Figures:
    """A ratio a token or a row, or predictions with target_tokens."""
    v, c = View(flat(drawn.examples()), drawn.config), drawn.config
    lp, targets = v["score_logprobs"], "target_tokens" in drawn.columns
    old, ref = v["logprobs" if targets else "behavior_log_probs"], v["score_ref_logprobs"]
    kl, total = k3(lp, ref), NAN
    rewards = NAN if targets else v["rewards"][v.n > 0].mean()
    if targets:
        a = v["advantages"]
        there = (old != 0) | (a != 0)
        ratio, a, kl, compared = np.exp(lp - old)[there], a[there], kl[there], sampler(old[there], lp[there])
        loss = total = (-np.minimum(ratio, c.clip_ratio) * a).sum()
        total += c.beta * kl.sum()
    elif len(old) == len(v.n):
        ratio, a = np.exp(v.total(lp) - old)[v.n > 0], v["rewards"][v.n > 0]
        loss, compared = (-np.minimum(ratio, c.clip_ratio) * a).mean(), dict.fromkeys(sampler(lp, lp), NAN)
    else:
        ratio, a, compared = np.exp(lp - old), v["advantages"], sampler(old, lp)
        loss = (-np.minimum(ratio, c.clip_ratio) * a).mean()
    return compared | {
        "policy_loss": loss, "is_ratio_mean": ratio.mean(), "is_ratio_max": ratio.max(), "is_ratio_min": ratio.min(),
        "clipped_fraction": (ratio > c.clip_ratio).mean(), "kl_divergence": kl.mean(), "advantage_mean": a.mean(),
        "reward_mean": rewards, "loss:sum": total,
    }  # fmt: skip


def a2po(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    implicit = drawn.config.beta2 * (v.total(v["score_logprobs"]) - v["ref_log_probs"])
    there = v.n > 0
    return {
        "implicit_reward": implicit[there].mean(),
        "advantage_mean": (v["rewards"] - v["optimal_values"])[there].mean(),
        "reward_mean": v["rewards"][there].mean(),
    }


# ------------------------------------------------------------------ supervised, distillation


def causal_lm(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    learned = v["weights"] > 0
    return {
        "perplexity": np.exp(-v["score_logprobs"][learned].mean()),
        "num_tokens": learned.sum(),
        "token_accuracy": v["score_correct"][learned].mean(),
    }


def cross_entropy(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    total = -(v["weights"] * v["score_candidate_logprobs"]).sum()
    return {"loss:sum": total, "nll": total / v["weights"].sum(), "num_tokens": (v["weights"] != 0).sum()}


def gkd(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    return {
        "divergence": v["score_divergence"].mean(), "nll": -v["score_logprobs"].mean(), "num_tokens": v.n.sum()
    }  # fmt: skip


def on_policy_distillation(drawn: Drawn) -> Figures:
    v, c = View(flat(drawn.examples()), drawn.config), drawn.config
    lp, old = v["score_logprobs"], v["old_log_probs"]
    reverse = old - v["ref_log_probs"]
    a, ratio = v.to_go(-c.kl_coef * reverse, c.gamma), np.exp(lp - old)
    return {
        "policy_loss": v.average(-ratio * a), "reverse_kl": reverse.mean(), "advantage_mean": a.mean(),
        "ratio_mean": ratio.mean(), "approx_kl": k3(old, lp).mean(), "num_tokens": v.n.sum(), **sampler(old, lp),
    }  # fmt: skip


def iw_opd(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    gap = v["ref_log_probs"] - v["old_log_probs"]
    before = np.concatenate([np.cumsum(abs(own)) - abs(own) for own in np.split(gap, np.cumsum(v.n)[:-1])])
    weights = 1 + drawn.config.gamma * (1 - before / v.total(abs(gap))[v.own])
    return {
        "policy_loss": v.average(-weights * gap * v["score_logprobs"]), "reverse_kl": -gap.mean(),
        "advantage_mean": (weights * gap).mean(), "weight_mean": weights.mean(), "num_tokens": v.n.sum(),
    }  # fmt: skip


def self_distillation(drawn: Drawn) -> Figures:
    c, examples = drawn.config, drawn.examples()
    v = View([student for student, _ in examples], c)
    lp, teacher = v["score_logprobs"], View([other for _, other in examples], c)["score_ref_logprobs"]
    ratio = np.exp(lp - v["old_log_probs"])
    weight = np.minimum(ratio, c.is_clip)
    figures = {
        "distillation_loss": (weight * (lp - teacher) * lp).mean(), "reverse_kl": (lp - teacher).mean(),
        "teacher_nll": -teacher.mean(), "is_ratio_mean": weight.mean(), "num_tokens": v.n.sum(),
    }  # fmt: skip
    if drawn.spec.name == "sdpo":
        figures["policy_loss"] = v.average(clipped(ratio, v["advantages"], 0.8, 1.2)[0])
    return figures


def top_k(drawn: Drawn) -> Figures:
    v = View(flat(drawn.examples()), drawn.config)
    q, p = np.exp(v["teacher_log_probs"]), np.exp(v["score_candidate_logprobs"])
    q_all, p_all = (np.concatenate([x, 1 - x.sum(1, keepdims=True)], 1) for x in (q, p))
    return {
        "divergence": (q_all * np.log(q_all / p_all)).sum(1).mean(), "teacher_mass": q.sum(1).mean(),
        "student_mass": p.sum(1).mean(), "num_tokens": v.n.sum(),
    }  # fmt: skip


def gold(drawn: Drawn) -> Figures:
    beta, divergences, distances, masses = drawn.config.beta, [], [], []
    for row in flat(drawn.examples()):
        earlier = 1.0
        for t in range(row.n):
            if not row.piece_ends[t]:
                earlier *= math.exp(row.score_logprobs[t])
                continue
            p, q = earlier * np.exp(row.score_candidate_logprobs[t]), np.exp(row.teacher_log_probs[t])
            both, only = np.array(row.shared[t]) > 0, np.array(row.own[t]) > 0
            m = beta * q + (1 - beta) * p
            divergences.append((beta * q * np.log(q / m) + (1 - beta) * p * np.log(p / m))[both].sum())
            distances.append(abs(np.sort(np.where(only, p, 0)) - np.sort(np.where(both, 0, q))).sum())
            masses.append((q.sum(), p[both | only].sum()))
            earlier = 1.0
    return {
        "shared_divergence": np.mean(divergences), "own_distance": np.mean(distances),
        "teacher_mass": np.mean(masses, 0)[0], "student_mass": np.mean(masses, 0)[1], "num_pieces": len(masses),
        "num_tokens": sum(row.n for row in flat(drawn.examples())),
    }  # fmt: skip
